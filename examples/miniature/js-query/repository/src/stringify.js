"use strict";

/** A query string of the values, in their order. */
function stringify(values) {
  return Object.entries(values)
    .map(([name, value]) => `${name}=${encode(value)}`)
    .join("&");
}

function encode(value) {
  return encodeURIComponent(String(value));
}

module.exports = { stringify };
