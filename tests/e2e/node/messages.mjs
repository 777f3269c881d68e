// Anthropic messages.
import Anthropic from "@anthropic-ai/sdk";
import { model, output, pixel, stream, system, tool } from "./settings.mjs";

export function open({ baseURL, key }) {
  const client = new Anthropic({ baseURL, apiKey: key });
  const messages = [];
  const ask = async (question, calls) => {
    const content = [...calls]
      .reverse()
      .map((call) => ({ type: "tool_result", tool_use_id: call.id, content: output(call) }));
    if (question !== null) {
      content.push({ type: "text", text: question });
      content.push({ type: "image", source: { type: "base64", media_type: "image/png", data: pixel } });
    }
    messages.push({ role: "user", content });
    const body = {
      model,
      max_tokens: 1000,
      system: [{ type: "text", text: system }],
      messages,
      tools: [{ name: tool.name, description: tool.description, input_schema: tool.parameters }],
    };
    const message = stream
      ? await client.messages.stream(body).finalMessage()
      : await client.messages.create(body);
    messages.push({ role: "assistant", content: message.content });
    const thinking = message.content.filter((block) => block.type === "thinking");
    return {
      text: message.content.filter((block) => block.type === "text").map((block) => block.text).join(""),
      reasoning: thinking.length ? thinking[0].thinking : null,
      calls: message.content
        .filter((block) => block.type === "tool_use")
        .map((block) => ({ id: block.id, name: block.name, arguments: block.input })),
    };
  };
  const wrong = () => client.messages.create({ model, max_tokens: 5, messages: [{ role: "nobody", content: "x" }], stream });
  const missing = () => client.messages.batches.retrieve("nothing");
  return { ask, wrong, missing };
}
