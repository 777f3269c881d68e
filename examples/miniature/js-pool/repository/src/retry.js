"use strict";

/** A job that is tried up to `times` times; the last error counts. */
function retry(job, times = 3) {
  return async () => {
    let last;
    for (let attempt = 1; attempt <= times; attempt += 1) {
      try {
        return await job(attempt);
      } catch (error) {
        last = error;
      }
    }
    throw last;
  };
}

module.exports = { retry };
