// What every client shares.
export const stream = process.env.STREAM === "1";
export const model = process.env.MODEL ?? "some-model";
export const system = "You are a careful agent.";
export const tool = {
  name: "bash",
  description: "Runs a command.",
  parameters: { type: "object", properties: { command: { type: "string" } }, required: ["command"] },
};
export const pixel =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==";
export const output = (call) => `output of ${call.arguments.command}`;
export const failed = (error) => ({ name: error.constructor.name, status: error.status ?? error.code ?? null });
