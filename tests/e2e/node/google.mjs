// Google generateContent.
import { GoogleGenAI } from "@google/genai";
import { failed, model, output, pixel, stream, system, tool } from "./settings.mjs";

export async function open({ baseURL, key }) {
  const client = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: baseURL } });
  const contents = [];
  const config = {
    systemInstruction: system,
    thinkingConfig: { includeThoughts: true },
    tools: [{ functionDeclarations: [{ name: tool.name, description: tool.description, parametersJsonSchema: tool.parameters }] }],
  };
  return async (question, calls) => {
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
}

export async function fail({ baseURL, key }) {
  const client = new GoogleGenAI({ apiKey: key, httpOptions: { baseUrl: baseURL } });
  try {
    await client.models.generateContent({ model, contents: [{ role: "nobody", parts: [{ text: "x" }] }] });
  } catch (error) {
    return failed(error);
  }
}
