"use strict";

const { slugify } = require("./slug");
const { Anchors } = require("./anchors");
const { tableOfContents } = require("./toc");

module.exports = { slugify, Anchors, tableOfContents };
