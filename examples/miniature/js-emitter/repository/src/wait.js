"use strict";

/** A promise of the next event; rejected after so many milliseconds. */
function next(emitter, event, milliseconds = 1000) {
  return new Promise((resolve, reject) => {
    const remove = emitter.once(event, (value) => {
      clearTimeout(timer);
      resolve(value);
    });
    const timer = setTimeout(() => {
      remove();
      reject(new Error(`no ${event} within ${milliseconds} ms`));
    }, milliseconds);
  });
}

module.exports = { next };
