"use strict";

const test = require("node:test");
const assert = require("node:assert");
const { Emitter } = require("../src/emitter");
const { next } = require("../src/wait");

const log = () => {
  const calls = [];
  return [calls, (name) => (...values) => calls.push([name, ...values].join(" "))];
};

test("listeners are called in order with the values", () => {
  const [calls, as] = log();
  const bus = new Emitter();
  bus.on("x", as("a"));
  bus.on("x", as("b"));
  assert.equal(bus.emit("x", 1, 2), 2);
  assert.deepEqual(calls, ["a 1 2", "b 1 2"]);
});
test("a star hears everything", () => {
  const [calls, as] = log();
  const bus = new Emitter();
  bus.on("*", as("all"));
  bus.emit("x", 1);
  assert.deepEqual(calls, ["all x 1"]);
});
test("once is once", () => {
  const [calls, as] = log();
  const bus = new Emitter();
  bus.once("x", as("a"));
  bus.emit("x");
  bus.emit("x");
  assert.deepEqual(calls, ["a"]);
});
test("what on returns removes the listener", () => {
  const bus = new Emitter();
  bus.on("x", () => {})();
  assert.equal(bus.count("x"), 0);
});
test("only functions listen", () => assert.throws(() => new Emitter().on("x", 1), TypeError));
test("a promise of the next event", async () => {
  const bus = new Emitter();
  const promise = next(bus, "x");
  bus.emit("x", 7);
  assert.equal(await promise, 7);
  assert.equal(bus.count("x"), 0);
});
