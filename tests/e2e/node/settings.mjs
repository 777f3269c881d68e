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
// What an SDK throws: its class, the status that it took from the answer, and what it says.
export async function failed(act) {
  try {
    await act();
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? null, message: error.message };
  }
  return { name: "nothing", status: 200, message: "" };
}
