"use strict";

/** Run functions that return promises, at most `limit` at a time. */
function runAll(jobs, { limit = 4, onProgress = () => {} } = {}) {
  return new Promise((resolve, reject) => {
    const results = [];
    let started = 0;
    let running = 0;

    const start = () => {
      if (results.length === jobs.length) return resolve(results);
      while (running < limit && started < jobs.length) {
        const job = jobs[started];
        started += 1;
        running += 1;
        job().then(
          (result) => {
            running -= 1;
            results.push(result);
            onProgress(results.length, jobs.length);
            start();
          },
          (error) => {
            running -= 1;
            reject(error);
            start();
          },
        );
      }
    };
    start();
  });
}

module.exports = { runAll };
