"use strict";

/** A heading as a part of a URL: lower-case letters, digits and single dashes. */
function slugify(text) {
  return text
    .toLowerCase()
    .replace(/&/g, " and ")
    .replace(/[^a-z0-9\s-]/g, "")
    .trim()
    .replace(/\s+/g, "-");
}

module.exports = { slugify };
