"use strict";

const { runAll } = require("./pool");
const { retry } = require("./retry");

module.exports = { runAll, retry };
