// The time line: the computation and what runs beside it, in seconds. It shows the same stretch of the step as the other pictures.

const LANE = 34;
const { streams } = plan;

// ---- seconds: program after program, each as long as it takes; positions are those at which the computation comes to each call
let duration = 0;
for (const program of programs) {
  program.since = duration;
  program.took = program.line.positions.at(-1);
  duration += program.took;
  program.eventOf = new Map(program.line.node.map((node, event) => [node, event]));
}

function nanosecondsOf(axis) {
  const program = programs.find((p) => axis < p.start + p.width) ?? programs.at(-1);
  return nanosecondsAt(program, ((axis - program.start) / program.width) * program.end);
}

function nanosecondsAt(program, time) {
  const { positions } = program.line;
  const call = Math.min(Math.max(Math.floor(time), 0), program.end - 1);
  return program.since + positions[call] + Math.min(time - call, 1) * (positions[call + 1] - positions[call]);
}

function axisOfNanoseconds(at) {
  const program = programs.find((p) => at < p.since + p.took) ?? programs.at(-1);
  const { positions } = program.line;
  const rest = at - program.since;
  let [low, high] = [0, program.end];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (positions[middle] <= rest) low = middle;
    else high = middle;
  }
  return axisOf(program, low + Math.min((rest - positions[low]) / (positions[low + 1] - positions[low] || 1), 1));
}

// a wait, or a collective that the computation waits for at once
const waitsAt = (program, time) => words[program.nodes.op[time]] === "packhorse.wait.default" || program.eventOf.has(time);

function inSeconds(nanoseconds) {
  const [unit, size] = [["s", 1e9], ["ms", 1e6], ["µs", 1e3]].find(([, size]) => Math.abs(nanoseconds) >= size) ?? ["ns", 1];
  return `${+(nanoseconds / size).toPrecision(4)} ${unit}`;
}

class TimeLine extends Plot {
  constructor(id, label) {
    super(id, label, 1, drawLine, pickEvent, () => null);
    this.host.style.height = `${MARGIN.top + MARGIN.bottom + LANE * (streams.length + 1)}px`;
  }
  measure() {
    super.measure();
    this.from = nanosecondsOf(view.from);
    this.span = Math.max(nanosecondsOf(view.to) - this.from, 1);
  }
  at(nanoseconds) {
    return MARGIN.left + ((nanoseconds - this.from) / this.span) * this.width;
  }
  nanosecondsHere(x) {
    return this.from + Math.min(Math.max((x - MARGIN.left) / this.width, 0), 1) * this.span;
  }
  x(program, time) {
    return this.at(nanosecondsAt(program, time));
  }
  axisAt(x) {
    return axisOfNanoseconds(this.nanosecondsHere(x));
  }
  grid() {
    const { pen } = this;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    ["compute", ...streams].forEach((name, lane) => {
      const top = MARGIN.top + LANE * lane;
      pen.fillStyle = colour("panel");
      pen.fillRect(MARGIN.left, top + 2, this.width, LANE - 4);
      pen.fillStyle = colour("ink");
      pen.fillText(name, MARGIN.left - 6, top + LANE / 2, MARGIN.left - 10);
    });
  }
  times() {
    const { pen } = this;
    const bottom = MARGIN.top + this.height;
    pen.textBaseline = "alphabetic";
    for (const program of this.visible()) {
      const [from, to] = [Math.max(this.at(program.since), MARGIN.left), Math.min(this.at(program.since + program.took), MARGIN.left + this.width)];
      if (to - from < 24) continue;
      pen.fillStyle = colour("soft");
      if (from > MARGIN.left) pen.fillRect(Math.round(from), MARGIN.top - 16, 1, this.height + 16);
      pen.textAlign = "left";
      pen.fillStyle = colour("ink");
      pen.fillText(program.name + (program.repeats === 1 ? "" : ` × ${program.repeats}`), from + 4, MARGIN.top - 8, Math.max(to - from - 4, 1));
    }
    pen.textAlign = "center";
    pen.textBaseline = "top";
    pen.fillStyle = colour("soft");
    const step = niceStep(this.span, Math.max(2, this.width / 90));
    for (let at = Math.ceil(this.from / step) * step; at <= this.from + this.span; at += step) {
      pen.fillRect(Math.round(this.at(at)), bottom, 1, 5);
      pen.fillText(at ? inSeconds(at) : "0", this.at(at), bottom + 8);
    }
    pen.fillText("predicted seconds", MARGIN.left + this.width / 2, bottom + 28);
  }
  strip() {}
}

function drawLine(plot, pen) {
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  const bar = (lane, from, to, name, text, least) => {
    const [left, width] = [plot.at(from), plot.at(to) - plot.at(from)];
    if (left + width < MARGIN.left || left > MARGIN.left + plot.width) return;
    const top = MARGIN.top + LANE * lane + 4;
    pen.fillStyle = colour(name);
    pen.fillRect(left, top, Math.max(width - (width > 4 ? 1 : 0), least), LANE - 8);
    if (width < 40) return;
    pen.save();
    pen.beginPath();
    pen.rect(left, top, width - 3, LANE - 8);
    pen.clip();
    pen.fillStyle = lane ? "#15181d" : colour("ink");
    pen.fillText(text, Math.max(left, MARGIN.left) + 4, top + LANE / 2 - 4);
    pen.restore();
  };
  for (const program of plot.visible()) {
    const { positions, stream, name, begin, end } = program.line;
    const phases = program.nodes.phase;
    const what = (time) => (waitsAt(program, time) ? "stall" : words[phases[time]]);
    for (let from = 0, to; from < phases.length; from = to) {
      for (to = from + 1; to < phases.length && (what(to) === what(from) || positions[to + 1] === positions[to]); ) to++;
      const kind = what(from);
      if (positions[to] > positions[from])
        bar(0, program.since + positions[from], program.since + positions[to], kind === "recompute" ? "recomputed" : kind, kind === "stall" ? "waits" : kind, 0.5);
    }
    stream.forEach((lane, i) => bar(lane + 1, program.since + begin[i], program.since + end[i], streams[lane], name[i], 1));
  }
}

function pickEvent(plot, x, y) {
  const moment = { ...momentOf(plot.axisAt(x)), timed: true };
  const lane = Math.floor((y - MARGIN.top) / LANE) - 1;
  const { stream, begin, end } = moment.program.line;
  const here = plot.nanosecondsHere(x) - moment.program.since;
  const near = (2 / plot.width) * plot.span;
  const event = stream.findIndex((s, i) => s === lane && begin[i] - near <= here && here <= end[i] + near);
  return event < 0 ? moment : { ...moment, event };
}
