"use strict";

const test = require("node:test");
const assert = require("node:assert");
const { runAll, retry } = require("../src");

const after = (turns, value) => async () => {
  for (let turn = 0; turn < turns; turn += 1) await null;
  return value;
};

test("nothing to do", async () => assert.deepEqual(await runAll([]), []));
test("one at a time", async () => {
  const order = [];
  const jobs = [5, 1].map((turns) => async () => {
    order.push(`start ${turns}`);
    await after(turns)();
    order.push(`end ${turns}`);
  });
  await runAll(jobs, { limit: 1 });
  assert.deepEqual(order, ["start 5", "end 5", "start 1", "end 1"]);
});
test("never more than the limit", async () => {
  let now = 0;
  let most = 0;
  const job = async () => {
    most = Math.max(most, (now += 1));
    await after(3)();
    now -= 1;
  };
  await runAll(Array(10).fill(job), { limit: 3 });
  assert.equal(most, 3);
});
test("progress is told", async () => {
  const told = [];
  await runAll([after(1), after(2)], { onProgress: (done, all) => told.push(`${done}/${all}`) });
  assert.deepEqual(told, ["1/2", "2/2"]);
});
test("a failure is the pool's failure", async () => {
  await assert.rejects(runAll([async () => { throw new Error("no"); }]), /no/);
});
test("a job is tried again", async () => {
  const job = retry(async (attempt) => { if (attempt < 3) throw new Error("not yet"); return attempt; });
  assert.deepEqual(await runAll([job]), [3]);
});
