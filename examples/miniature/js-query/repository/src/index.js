"use strict";

const { parse } = require("./parse");
const { stringify } = require("./stringify");

/** The URL with values of its query replaced; a value of `null` removes the name. */
function withQuery(url, changes) {
  const [path, query = ""] = url.split("?");
  const text = stringify({ ...parse(query), ...changes });
  return text ? `${path}?${text}` : path;
}

module.exports = { parse, stringify, withQuery };
