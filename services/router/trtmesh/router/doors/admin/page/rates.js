// Rates between looks, and their course over the last minute.

const LENGTH = 60;

export class Rates {
  #before = new Map();
  #now = new Map();
  #seconds = 0;
  #time = 0;

  // Begins a look; what was not counted in the last one is forgotten.
  begin(time) {
    [this.#before, this.#now] = [this.#now, new Map()];
    [this.#seconds, this.#time] = [time - this.#time, time];
  }

  // Notes a counter. Returns {rate, course, still}: per second, null at first; the latest rates; seconds without growth.
  count(key, value) {
    const last = this.#before.get(key);
    const fresh = !last || value < last.value || this.#seconds <= 0;
    const rate = fresh ? null : (value - last.value) / this.#seconds;
    const course = last ? last.course : [];
    if (rate !== null) course.push(rate);
    if (course.length > LENGTH) course.shift();
    const since = !fresh && value === last.value ? last.since : this.#time;
    const noted = { value, rate, course, since, still: this.#time - since };
    this.#now.set(key, noted);
    return noted;
  }
}
