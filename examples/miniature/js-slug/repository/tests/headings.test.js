"use strict";

const test = require("node:test");
const assert = require("node:assert");
const { slugify, Anchors, tableOfContents } = require("../src");

test("words are joined by dashes", () => assert.equal(slugify("Hello, big World!"), "hello-big-world"));
test("an ampersand is a word", () => assert.equal(slugify("Salt & Pepper"), "salt-and-pepper"));
test("repeated headings are numbered", () => {
  const anchors = new Anchors();
  assert.deepEqual(["A", "A", "A"].map((h) => anchors.next(h)), ["a", "a-1", "a-2"]);
});
test("a heading of signs alone is a section", () => assert.equal(new Anchors().next("!?"), "section"));
test("the table of contents has levels", () => {
  const found = tableOfContents("# One\n\n## Two ##\n\n#### Deep\n");
  assert.deepEqual(found, [
    { level: 1, title: "One", anchor: "one" },
    { level: 2, title: "Two", anchor: "two" },
  ]);
});
test("code is no heading", () => assert.deepEqual(tableOfContents("```\n# x\n```\n"), []));
