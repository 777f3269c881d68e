"use strict";

const { slugify } = require("./slug");

/** Gives each heading of a document an anchor of its own, in order. */
class Anchors {
  constructor() {
    this.counts = new Map();
  }

  /** The anchor of the next heading; `section` if nothing of its text can be used. */
  next(heading) {
    const slug = slugify(heading) || "section";
    const count = this.counts.get(slug) || 0;
    this.counts.set(slug, count + 1);
    return count === 0 ? slug : `${slug}-${count}`;
  }
}

module.exports = { Anchors };
