// The trace of one answer: which tokens of the prompt its steps selected, exact attention by layer, transferred bytes.

const LONGEST = 240; // characters of a passage of the prompt
const SHORTEST = 60;

export class Trace {
  // `offset`: length of the answer before the request, for answers that are continued.
  constructor(offset) {
    this.offset = offset;
    this.head = null; // first event: policy, layers, bins of the prompt
    this.attended = []; // exact attention fraction `[steps][layers]`
    this.events = []; // {from, to, steps, selected}: selections per bin while the text from..to was generated
    this.passages = []; // spans of bins that are shown together
    this.prefill = null;
    this.bytes = 0;
    this.lastBytes = 0;
    this.steps = 0;
  }

  // Add an event of the server. `at`: length of the answer so far.
  take(data, at) {
    if (data.bins) {
      this.head = data;
      this.passages = passages(data.bins);
      return;
    }
    this.prefill = data.prefill;
    this.attended.push(...data.attended);
    this.lastBytes = data.h2d_bytes - this.bytes;
    this.bytes = data.h2d_bytes;
    const from = this.events.at(-1)?.to ?? this.offset;
    if (data.selected) this.events.push({ from, to: at, steps: data.step - this.steps, selected: Uint32Array.from(data.selected) });
    this.steps = data.step;
  }

  get selects() { return this.head !== null && this.head.bins.length > 0 && this.head.layers > this.head.dense_layers.length; }

  // Selections per bin during the steps that generated the text from..to, and the number of these steps.
  selected(from = -1, to = Infinity) {
    const counts = new Array(this.head.bins.length).fill(0);
    let steps = 0;
    for (const event of this.events) {
      if (event.to <= from || event.from >= to) continue;
      steps += event.steps;
      event.selected.forEach((number, i) => { counts[i] += number; });
    }
    return { counts, steps };
  }

  // Fraction of layers, heads and steps that selected a token of each passage, on average.
  shares({ counts, steps }) {
    const choices = steps * (this.head.layers - this.head.dense_layers.length) * this.head.kv_heads * this.head.bin_tokens;
    return this.passages.map(({ first, last }) => {
      let sum = 0;
      for (let i = first; i <= last; i++) sum += counts[i];
      return sum / Math.max(1, choices * (last - first + 1));
    });
  }
}

// Group bins into passages: they end with a sentence or a line, or at `LONGEST` characters.
function passages(bins) {
  const found = [];
  let first = 0, text = "";
  bins.forEach((bin, i) => {
    text += bin;
    const ends = /[.!?:;]["'”’)]*\s*$|\n\s*$/.test(text);
    if ((ends && text.length >= SHORTEST) || text.length >= LONGEST || i === bins.length - 1) {
      found.push({ first, last: i, text: text.trim().replace(/\s+/g, " ") });
      [first, text] = [i + 1, ""];
    }
  });
  return found;
}
