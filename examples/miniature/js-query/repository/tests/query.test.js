"use strict";

const test = require("node:test");
const assert = require("node:assert");
const { parse, stringify, withQuery } = require("../src");

test("names and values", () => assert.deepEqual({ ...parse("?a=1&b=two") }, { a: "1", b: "two" }));
test("escapes are decoded", () => assert.deepEqual({ ...parse("a=%C3%A4%26") }, { a: "ä&" }));
test("empty parts are nothing", () => assert.deepEqual({ ...parse("?&a=1&&") }, { a: "1" }));
test("values are encoded", () => assert.equal(stringify({ a: "x&y", b: 2 }), "a=x%26y&b=2"));
test("a query is added", () => assert.equal(withQuery("/path", { a: 1 }), "/path?a=1"));
test("a value is replaced", () => assert.equal(withQuery("/path?a=1&b=2", { a: 3 }), "/path?a=3&b=2"));
