// One conversation of an agent with tools, told through one official SDK. Settings come from the environment; what the
// SDK parsed goes to standard output as JSON: {turns: [{text, reasoning, calls: [{id, name, arguments}]}], failure}.
const { SDK, BASE_URL, KEY } = process.env;
const questions = ["List the files, please.", "Once more, please."];
const client = await import(new URL(`./${SDK}.mjs`, import.meta.url));
const ask = await client.open({ baseURL: BASE_URL, key: KEY });
const turns = [];
for (const question of questions) {
  let turn = await ask(question, []);
  turns.push(turn);
  for (let step = 0; turn.calls.length > 0 && step < 8; step++) {
    turn = await ask(null, turn.calls);
    turns.push(turn);
  }
}
const failure = await client.fail({ baseURL: BASE_URL, key: KEY });
process.stdout.write(JSON.stringify({ turns, failure }));
