// OpenAI chat completions.
import OpenAI from "openai";
import { model, output, pixel, stream, system, tool } from "./settings.mjs";

export function open({ baseURL, key }) {
  const client = new OpenAI({ baseURL: `${baseURL}/v1`, apiKey: key });
  const messages = [{ role: "system", content: system }];
  const ask = async (question, calls) => {
    if (question !== null) {
      const image = { type: "image_url", image_url: { url: `data:image/png;base64,${pixel}` } };
      messages.push({ role: "user", content: [{ type: "text", text: question }, image] });
    }
    for (const call of [...calls].reverse()) {
      messages.push({ role: "tool", tool_call_id: call.id, content: output(call) });
    }
    const body = { model, messages, tools: [{ type: "function", function: tool }] };
    const completion = stream
      ? await client.chat.completions.stream(body).finalChatCompletion()
      : await client.chat.completions.create(body);
    const message = completion.choices[0].message;
    messages.push(message);
    return {
      text: message.content ?? "",
      reasoning: message.reasoning_content ?? null,
      calls: (message.tool_calls ?? []).map((call) => ({
        id: call.id,
        name: call.function.name,
        arguments: JSON.parse(call.function.arguments),
      })),
    };
  };
  const wrong = () => client.chat.completions.create({ model, messages: [{ role: "nobody", content: "x" }], stream });
  const missing = () => client.chat.completions.retrieve("nothing");
  return { ask, wrong, missing };
}
