// Google generateContent.
import { GoogleGenAI } from "@google/genai";
import { model, output, pixel, stream, system, tool } from "./settings.mjs";

export function open({ baseURL, key }) {
  const client = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: baseURL } });
  const contents = [];
  const config = {
    systemInstruction: system,
    thinkingConfig: { includeThoughts: true },
    tools: [{ functionDeclarations: [{ name: tool.name, description: tool.description, parametersJsonSchema: tool.parameters }] }],
  };
  const ask = async (question, calls) => {
    const parts = [...calls]
      .reverse()
      .map((call) => ({ functionResponse: { id: call.id, name: call.name, response: { output: output(call) } } }));
    if (question !== null) {
      parts.push({ text: question }, { inlineData: { mimeType: "image/png", data: pixel } });
    }
    contents.push({ role: "user", parts });
    const given = [];
    if (stream) {
      for await (const chunk of await client.models.generateContentStream({ model, contents, config })) {
        given.push(...(chunk.candidates?.[0]?.content?.parts ?? []));
      }
    } else {
      const response = await client.models.generateContent({ model, contents, config });
      given.push(...response.candidates[0].content.parts);
    }
    contents.push({ role: "model", parts: given });
    const thoughts = given.filter((part) => part.thought).map((part) => part.text);
    return {
      text: given.filter((part) => part.text && !part.thought).map((part) => part.text).join(""),
      reasoning: thoughts.length ? thoughts.join("") : null,
      calls: given
        .filter((part) => part.functionCall)
        .map(({ functionCall }) => ({ id: functionCall.id, name: functionCall.name, arguments: functionCall.args })),
    };
  };
  const wrong = () => {
    const body = { model, contents: [{ role: "nobody", parts: [{ text: "x" }] }] };
    return stream ? client.models.generateContentStream(body) : client.models.generateContent(body);
  };
  const missing = () => client.files.get({ name: "nothing" });
  return { ask, wrong, missing };
}
