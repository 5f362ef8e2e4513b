// Rates between snapshots, and their course over the last minute.

const LENGTH = 60;

export class Rates {
  #before = new Map();
  #now = new Map();
  #seconds = 0;
  #time = 0;

  // Begins a snapshot; what was not counted in the last one is forgotten.
  begin(time) {
    [this.#before, this.#now] = [this.#now, new Map()];
    [this.#seconds, this.#time] = [time - this.#time, time];
  }

  // Notes a counter. Returns how much it has grown, its rate (null at first), the latest rates, and for how many seconds
  // it has stood still.
  count(key, value) {
    const last = this.#before.get(key);
    const fresh = !last || value < last.value || this.#seconds <= 0;
    const grown = fresh ? 0 : value - last.value;
    const rate = fresh ? null : grown / this.#seconds;
    const course = last ? last.course : [];
    if (rate !== null) course.push(rate);
    if (course.length > LENGTH) course.shift();
    const since = fresh || grown ? this.#time : last.since;
    const noted = { value, grown, rate, course, since, still: this.#time - since };
    this.#now.set(key, noted);
    return noted;
  }
}
