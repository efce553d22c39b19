// The history as Python packed it: the reader of the layout in lab/pack.py (twin of lab/history.py), and its questions.
//
// Owns: bytes, frames, rows, steps, waits; the state at a frame; a block's lineage.
// Knows nothing about: widgets, where anybody looks.
// Invariants: the state at a frame is a function of the bytes and the frame. `append` only ever adds.

const [TAG_HEAD, TAG_REQUESTS, TAG_WORDS, TAG_FRAME, TAG_KEYFRAME] = [1, 2, 3, 4, 5];
const HEADER_LENGTH = 6;
const NUM_BLOCK_COLUMNS = LAB.blockColumns.length;
const NUM_REQUEST_COLUMNS = LAB.requestColumns.length;
const MARKED = new Set(LAB.marks.map(([row]) => row));

/** Whole numbers, growing at the end. */
class Numbers {
  constructor() {
    this.values = new Int32Array(64);
    this.length = 0;
  }
  push(value) {
    if (this.length === this.values.length) this.values = grown(this.values, 2 * this.length);
    this.values[this.length++] = value;
  }
  at(index) {
    return this.values[index];
  }
  set(index, value) {
    this.values[index] = value;
  }
}

function grown(array, length) {
  const larger = new array.constructor(length);
  larger.set(array);
  return larger;
}

/** Reads LEB128 numbers from bytes. */
class Reader {
  constructor(bytes, at) {
    this.bytes = bytes;
    this.at = at;
  }
  number() {
    let byte = this.bytes[this.at++];
    if (byte < 0x80) return byte;
    let value = byte & 0x7f, scale = 0x80;
    do {
      byte = this.bytes[this.at++];
      value += (byte & 0x7f) * scale;
      scale *= 0x80;
    } while (byte >= 0x80);
    return value;
  }
  signed() {
    const code = this.number();
    return code % 2 ? -(code + 1) / 2 : code / 2;
  }
}

/** One frame's columns. `state.block_owner[block]`, `state.computed[request]`, and so on. */
class State {
  constructor(numBlocks) {
    this.frame = -1;
    this.blockCells = LAB.blockColumns.map(() => new Int32Array(numBlocks));
    this.requestCells = LAB.requestColumns.map(() => new Int32Array(16));
    const name = (key, get) => Object.defineProperty(this, key, { get });
    LAB.blockColumns.forEach((key, c) => name(`block_${key}`, () => this.blockCells[c]));
    LAB.requestColumns.forEach((key, c) => name(key, () => this.requestCells[c]));
  }
  clear() {
    for (const cells of [...this.blockCells, ...this.requestCells]) cells.fill(0);
  }
  widen(numRequests) {
    const width = this.requestCells[0].length;
    if (numRequests <= width) return;
    this.requestCells = this.requestCells.map((cells) => grown(cells, Math.max(numRequests, 2 * width)));
  }
}

/** What Python packed: see lab/pack.py for the layout. Grows with `append`. */
class History {
  constructor(bytes) {
    this.bytes = new Uint8Array(0);
    this.size = 0;
    this.head = { config: {}, meta: {}, source: "" };
    this.requests = [];
    this.words = [];
    this.frames = Object.fromEntries(
      ["step", "kind", "at", "fenced", "processed", "newest", "free", "changes", "row"].map((name) => [name, new Numbers()])
    );
    this.rows = { kind: new Numbers(), frame: new Numbers(), fields: new Numbers(), values: new Numbers() };
    this.steps = Object.fromEntries(
      ["number", "seq", "frame", "delivered", "calls", "callsBefore", "free", "time", "tokens", "written"].map((name) => [
        name, new Numbers(),
      ])
    );
    this.written = { request: new Numbers(), tokens: new Numbers(), runs: new Numbers() };
    this.runs = { first: new Numbers(), length: new Numbers() };
    this.waits = Object.fromEntries(
      ["request", "blocks", "fence", "reason", "released", "returned"].map((name) => [name, new Numbers()])
    );
    this.marks = new Numbers();
    this.deliveries = { frame: new Numbers(), tokens: new Numbers(), time: new Numbers() };
    this.keyframes = { frame: new Numbers(), at: new Numbers() };
    this.lastWritten = new Map();
    this.stepIndex = new Map();
    this.state = null;
    this.append(bytes);
  }

  get numFrames() {
    return this.frames.step.length;
  }
  get numBlocks() {
    return this.head.config.num_blocks;
  }
  get numSteps() {
    return this.steps.number.length;
  }
  get lastStep() {
    return this.numFrames ? this.frames.step.at(this.numFrames - 1) : 0;
  }

  append(piece) {
    if (this.size + piece.length > this.bytes.length) {
      this.bytes = grown(this.bytes, Math.max(this.size + piece.length, Math.min(2 * this.bytes.length, 1 << 26)));
    }
    this.bytes.set(piece, this.size);
    const reader = new Reader(this.bytes, this.size || HEADER_LENGTH);
    this.size += piece.length;
    while (reader.at < this.size) {
      const tag = reader.number(), length = reader.number(), end = reader.at + length;
      this.takeChunk(tag, reader, end);
      reader.at = end;
    }
    this.lineages = null;
  }

  takeChunk(tag, reader, end) {
    if (tag === TAG_FRAME) return this.takeFrame(reader);
    if (tag === TAG_KEYFRAME) {
      this.keyframes.frame.push(this.numFrames - 1);
      this.keyframes.at.push(reader.at);
      return;
    }
    const value = JSON.parse(new TextDecoder().decode(this.bytes.subarray(reader.at, end)));
    if (tag === TAG_HEAD) {
      this.head = value;
      this.state = new State(value.config.num_blocks);
    } else if (tag === TAG_REQUESTS) {
      for (const [id, prompt, maxTokens, priority, arrival] of value) {
        this.requests.push({ id, prompt, maxTokens, priority, arrival });
      }
    } else if (tag === TAG_WORDS) this.words.push(...value);
  }

  takeFrame(reader) {
    const { frames } = this, index = this.numFrames;
    frames.step.push(reader.number());
    frames.kind.push(reader.number());
    frames.at.push(reader.number() + (index ? frames.at.at(index - 1) : 0));
    frames.fenced.push(reader.number());
    frames.processed.push(reader.number());
    frames.newest.push(reader.number());
    frames.free.push(reader.number());
    frames.row.push(this.rows.kind.length);
    for (let left = reader.number(); left > 0; left--) this.takeRow(reader, index);
    frames.changes.push(reader.at);
  }

  takeRow(reader, frame) {
    const kind = reader.number(), { rows } = this, at = rows.values.length;
    rows.kind.push(kind);
    rows.frame.push(frame);
    rows.fields.push(at);
    for (let i = LAB.rowFields[kind].length; i > 0; i--) rows.values.push(reader.number());
    const field = (i) => rows.values.at(at + i);
    if (MARKED.has(kind)) this.marks.push(rows.kind.length - 1);
    if (kind === LAB.rows.SCHEDULED) this.takeStep(reader, frame, field);
    else if (kind === LAB.rows.DELIVERED) this.endStep(frame, field);
    else if (kind === LAB.rows.RELEASED) this.beginWait(frame, field);
    else if (kind === LAB.rows.RETURNED) this.endWait(frame, field);
    else if (kind === LAB.rows.COUNTED) this.steps.seq.set(this.stepIndex.get(field(0)), field(1));
  }

  takeStep(reader, frame, field) {
    const { steps } = this, index = this.numSteps;
    const before = index ? steps.callsBefore.at(index - 1) + steps.calls.at(index - 1) : 0;
    this.stepIndex.set(field(0), index);
    steps.number.push(field(0));
    steps.seq.push(field(1));
    steps.calls.push(field(2));
    steps.callsBefore.push(before);
    steps.free.push(field(3));
    steps.time.push(field(4));
    steps.frame.push(frame);
    steps.delivered.push(-1);
    steps.written.push(this.written.request.length);
    let request = 0, tokens = 0;
    for (let left = reader.number(); left > 0; left--) {
      request += reader.signed();
      tokens += this.takeWritten(reader, request);
    }
    steps.tokens.push(tokens);
  }

  takeWritten(reader, request) {
    const code = reader.number(), { runs } = this, tokens = code >> 1;
    this.written.request.push(request);
    this.written.tokens.push(tokens);
    this.written.runs.push(runs.first.length);
    if (code & 1) {
      runs.first.push(this.lastWritten.get(request));
      runs.length.push(1);
      return tokens;
    }
    for (let left = reader.number(); left > 0; left--) {
      const first = reader.number(), length = reader.number();
      runs.first.push(first);
      runs.length.push(length);
      this.lastWritten.set(request, first + length - 1);
    }
    return tokens;
  }

  endStep(frame, field) {
    const index = this.stepIndex.get(field(0));
    if (index !== undefined) this.steps.delivered.set(index, frame);
    this.deliveries.frame.push(frame);
    this.deliveries.tokens.push(field(1));
    this.deliveries.time.push(field(2));
  }

  beginWait(frame, field) {
    const { waits } = this;
    waits.request.push(field(0) - 1);
    waits.blocks.push(field(1));
    waits.fence.push(field(2));
    waits.reason.push(field(3));
    waits.released.push(frame);
    waits.returned.push(-1);
  }

  endWait(frame, field) {
    const { waits } = this;
    for (let i = waits.request.length - 1; i >= 0; i--) {
      if (waits.returned.at(i) < 0 && waits.request.at(i) === field(0) - 1 && waits.fence.at(i) === field(2)) {
        waits.returned.set(i, frame);
        return;
      }
    }
  }

  // ---- the state at a frame

  seek(frame) {
    const { state, keyframes } = this;
    state.widen(this.requests.length);
    const key = lastAtMost(keyframes.frame, frame);
    const known = key < 0 ? -1 : keyframes.frame.at(key);
    if (state.frame > frame || state.frame < known) {
      state.clear();
      if (key >= 0) this.applyChanges(keyframes.at.at(key));
      state.frame = known;
    }
    while (state.frame < frame) this.applyChanges(this.frames.changes.at(++state.frame));
    return state;
  }

  applyChanges(at, onRun = null) {
    const reader = new Reader(this.bytes, at), { state } = this;
    const mask = reader.number();
    for (let c = 0; c < NUM_BLOCK_COLUMNS + NUM_REQUEST_COLUMNS; c++) {
      if (!((mask >> c) & 1)) continue;
      const cells = c < NUM_BLOCK_COLUMNS ? state.blockCells[c] : state.requestCells[c - NUM_BLOCK_COLUMNS];
      let cell = 0;
      for (let left = reader.number(); left > 0; left--) {
        cell += reader.number();
        const end = cell + reader.number(), difference = reader.signed();
        if (onRun) onRun(c, cell, end, difference);
        else for (let i = cell; i < end; i++) cells[i] += difference;
        cell = end;
      }
    }
  }

  // ---- questions

  /** Fields of a row by name, with `kind` and `frame`. */
  row(index) {
    const { rows } = this, kind = rows.kind.at(index), at = rows.fields.at(index);
    const row = { kind, frame: rows.frame.at(index) };
    LAB.rowFields[kind].forEach((name, i) => (row[name] = rows.values.at(at + i)));
    return row;
  }

  rowsOf(frame) {
    const end = frame + 1 < this.numFrames ? this.frames.row.at(frame + 1) : this.rows.kind.length;
    const found = [];
    for (let i = this.frames.row.at(frame); i < end; i++) found.push(this.row(i));
    return found;
  }

  nameOf(ref) {
    return ref > 0 && ref <= this.requests.length ? this.requests[ref - 1].id : "";
  }

  /** Index of the last step decided at or before a frame; -1 if there is none. */
  stepAt(frame) {
    return lastAtMost(this.steps.frame, frame);
  }

  /** Steps in flight at the end of a frame, as indices, oldest first. */
  inFlight(frame) {
    const { steps } = this, found = [];
    for (let i = this.stepAt(frame); i >= 0; i--) {
      if (!steps.tokens.at(i)) continue;
      const delivered = steps.delivered.at(i);
      if (delivered >= 0 && delivered <= frame) break;
      found.unshift(i);
    }
    return found;
  }

  /** How many requests a step scheduled. */
  numScheduled(step) {
    const end = step + 1 < this.numSteps ? this.steps.written.at(step + 1) : this.written.request.length;
    return end - this.steps.written.at(step);
  }

  /** Calls visit(request, tokens, index) for every request of a step. */
  eachScheduled(step, visit) {
    const { written } = this, first = this.steps.written.at(step), end = first + this.numScheduled(step);
    for (let w = first; w < end; w++) visit(written.request.at(w), written.tokens.at(w), w);
  }

  /** Calls visit(request, first, length) for every run of blocks that a step writes. */
  eachWritten(step, visit) {
    const { written, runs } = this;
    this.eachScheduled(step, (request, tokens, w) => {
      const end = w + 1 < written.request.length ? written.runs.at(w + 1) : runs.first.length;
      for (let r = written.runs.at(w); r < end; r++) visit(request, runs.first.at(r), runs.length.at(r));
    });
  }

  /** A block's past and future: periods {owner, fence, cached, from, to} (frames; `to` is where the next one begins). */
  lineage(block) {
    this.lineages ??= this.collectLineages();
    const { first, frame, column, value } = this.lineages;
    const cells = [0, 0, 0, 0], periods = [];
    let now = { owner: 0, fence: 0, cached: false, from: 0, to: this.numFrames };
    for (let i = first[block]; i < first[block + 1]; ) {
      const at = frame[i];
      for (; i < first[block + 1] && frame[i] === at; i++) cells[column[i]] += value[i];
      const [owner, , flags] = cells, cached = (flags & LAB.flags.CACHED) > 0;
      const fence = flags & LAB.flags.FENCED ? cells[3] : 0;
      if (owner === now.owner && fence === now.fence && (owner > 0 || cached === now.cached)) continue;
      if (at > now.from) periods.push({ ...now, to: at });
      now = { owner, fence, cached, from: at, to: this.numFrames };
    }
    return [...periods, now];
  }

  /** All changes of blocks' cells, sorted by block: one pass over the bytes, made when first asked for. */
  collectLineages() {
    const block = new Numbers(), frame = new Numbers(), column = new Numbers(), value = new Numbers();
    const count = new Int32Array(this.numBlocks + 1);
    for (let f = 0; f < this.numFrames; f++) {
      this.applyChanges(this.frames.changes.at(f), (c, start, end, difference) => {
        if (c >= NUM_BLOCK_COLUMNS) return;
        for (let b = start; b < end; b++) {
          block.push(b);
          frame.push(f);
          column.push(c);
          value.push(difference);
          count[b + 1]++;
        }
      });
    }
    for (let b = 0; b < this.numBlocks; b++) count[b + 1] += count[b];
    const next = count.slice(), size = block.length;
    const sorted = { first: count, frame: new Int32Array(size), column: new Int32Array(size), value: new Int32Array(size) };
    for (let i = 0; i < size; i++) {
      const to = next[block.at(i)]++;
      sorted.frame[to] = frame.at(i);
      sorted.column[to] = column.at(i);
      sorted.value[to] = value.at(i);
    }
    return sorted;
  }
}

/** Index of the last entry of ascending numbers that is at most `value`; -1 if none. */
function lastAtMost(numbers, value) {
  let low = 0, high = numbers.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (numbers.at(middle) <= value) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}
