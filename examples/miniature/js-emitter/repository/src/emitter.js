"use strict";

/** Listeners by event, called in the order in which they were added. */
class Emitter {
  constructor() {
    this.listeners = new Map();
  }

  on(event, listener) {
    if (typeof listener !== "function") throw new TypeError("a listener is a function");
    const known = this.listeners.get(event);
    if (known) known.push(listener);
    else this.listeners.set(event, [listener]);
    return () => this.off(event, listener);
  }

  once(event, listener) {
    const wrapped = (...values) => {
      this.off(event, wrapped);
      listener(...values);
    };
    return this.on(event, wrapped);
  }

  /** Remove a listener, the one that was added first if it was added twice; whether it was there. */
  off(event, listener) {
    const known = this.listeners.get(event) || [];
    const index = known.indexOf(listener);
    if (index < 0) return false;
    known.splice(index, 1);
    if (known.length === 0) this.listeners.delete(event);
    return true;
  }

  /** Call the listeners of an event, then those of `*` with the event's name first; how many were called. */
  emit(event, ...values) {
    let called = 0;
    for (const listener of this.listeners.get(event) || []) {
      listener(...values);
      called += 1;
    }
    if (event !== "*") {
      for (const listener of this.listeners.get("*") || []) {
        listener(event, ...values);
        called += 1;
      }
    }
    return called;
  }

  count(event) {
    return (this.listeners.get(event) || []).length;
  }
}

module.exports = { Emitter };
