// One conversation of an agent with tools, told through one official SDK, and then all that can go wrong. Settings come from
// the environment; what the SDK parsed and threw goes to standard output as JSON:
// {turns: [{text, reasoning, calls: [{id, name, arguments}]}], failures: {kind: {name, status, message}}}.
import { failed } from "./settings.mjs";

const { SDK, BASE_URL, KEY, SHORT_KEY } = process.env;
const questions = ["List the files, please.", "Once more, please."];
const { open } = await import(new URL(`./${SDK}.mjs`, import.meta.url));
const { ask } = open({ baseURL: BASE_URL, key: KEY });
const turns = [];
for (const question of questions) {
  let turn = await ask(question, []);
  turns.push(turn);
  for (let step = 0; turn.calls.length > 0 && step < 8; step++) {
    turn = await ask(null, turn.calls);
    turns.push(turn);
  }
}
const short = open({ baseURL: BASE_URL, key: SHORT_KEY });
const stranger = open({ baseURL: BASE_URL, key: "nobody's" });
const failures = {
  unauthorised: await failed(() => stranger.ask("Hi.", [])),
  too_long: await failed(() => short.ask("word ".repeat(3000), [])),
  wrong: await failed(short.wrong),
  missing: await failed(short.missing),
};
process.stdout.write(JSON.stringify({ turns, failures }));
