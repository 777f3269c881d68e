"use strict";

/** The values of a query string by name. */
function parse(query) {
  const values = {};
  for (const part of query.replace(/^\?/, "").split("&")) {
    if (!part) continue;
    const [name, value] = part.split("=");
    values[decode(name)] = decode(value);
  }
  return values;
}

function decode(text) {
  return decodeURIComponent(text);
}

module.exports = { parse };
