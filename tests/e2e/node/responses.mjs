// OpenAI responses.
import OpenAI from "openai";
import { model, output, pixel, stream, system, tool } from "./settings.mjs";

export function open({ baseURL, key }) {
  const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: key });
  const input = [];
  const ask = async (question, calls) => {
    if (question !== null) {
      const image = { type: "input_image", image_url: `data:image/png;base64,${pixel}`, detail: "auto" };
      input.push({ role: "user", content: [{ type: "input_text", text: question }, image] });
    }
    for (const call of [...calls].reverse()) {
      input.push({ type: "function_call_output", call_id: call.id, output: output(call) });
    }
    const body = {
      model,
      instructions: system,
      input,
      store: false,
      include: ["reasoning.encrypted_content"],
      tools: [{ type: "function", strict: null, ...tool }],
    };
    const response = stream
      ? await client.responses.stream(body).finalResponse()
      : await client.responses.create(body);
    input.push(...response.output);
    const reasoning = response.output.filter((item) => item.type === "reasoning");
    return {
      text: response.output_text,
      reasoning: reasoning.length ? reasoning[0].summary.map((part) => part.text).join("") : null,
      calls: response.output
        .filter((item) => item.type === "function_call")
        .map((item) => ({ id: item.call_id, name: item.name, arguments: JSON.parse(item.arguments) })),
    };
  };
  const wrong = () => client.responses.create({ model, input: [{ role: "nobody", content: "x" }], stream });
  const missing = () => client.responses.retrieve("resp_0a");
  return { ask, wrong, missing };
}
