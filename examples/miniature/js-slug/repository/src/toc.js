"use strict";

const { Anchors } = require("./anchors");

/** The headings of a Markdown text: level, title and anchor. Lines in fenced code are no headings. */
function tableOfContents(markdown, { depth = 3 } = {}) {
  const anchors = new Anchors();
  const found = [];
  let fenced = false;
  for (const line of markdown.split("\n")) {
    if (line.startsWith("```")) fenced = !fenced;
    const match = !fenced && /^(#{1,6})\s+(.*?)\s*#*$/.exec(line);
    if (!match) continue;
    const entry = { level: match[1].length, title: match[2], anchor: anchors.next(match[2]) };
    if (entry.level <= depth) found.push(entry);
  }
  return found;
}

module.exports = { tableOfContents };
