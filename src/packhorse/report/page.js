// Draws the two pictures of a plan from the JSON in the page: bytes over the step, and the arena as time x offset.
// Canvas and hit-testing by search, as a step may have tens of thousands of tensors. Everything is written as text, never as HTML.
"use strict";
(() => {
  const plan = JSON.parse(document.getElementById("plan").textContent);
  const { kinds, words, programs } = plan;
  const MARGIN = { left: 62, right: 14, top: 26, bottom: 54 };
  const LEAST_SHARE = 0.07; // of the width, so that a program of two calls can still be seen

  // ---- time axis: every program has a stretch [start, start + width) of it
  const calls = programs.reduce((sum, program) => sum + program.end, 0);
  let length = 0;
  for (const program of programs) {
    program.start = length;
    program.width = Math.max(program.end, LEAST_SHARE * calls);
    length += program.width;
  }
  const view = { from: 0, to: length };
  const axisOf = (program, time) => program.start + (time / program.end) * program.width;

  function momentOf(axis) {
    const program = programs.find((p) => axis < p.start + p.width) ?? programs.at(-1);
    const time = Math.floor(((axis - program.start) / program.width) * program.end);
    return { program, time: Math.min(Math.max(time, 0), program.end - 1) };
  }

  // ---- bands: bytes by time, persistent first, then the arena's kinds, then what kernels allocate
  const bands = [
    ...plan.persistent.map(([name, bytes]) => ({ name, colour: name, bytes })),
    ...kinds.map((name, kind) => ({ name, colour: name, kind, external: false })),
    ...kinds.map((name, kind) => ({ name, colour: name, kind, external: true })),
  ];
  for (const program of programs) {
    const { lower, upper, size, offset, kind } = program.stays;
    program.bands = bands.map((band) => {
      const at = new Float64Array(program.end + 1);
      if (band.kind === undefined) return at.fill(band.bytes);
      for (let i = 0; i < lower.length; i++) {
        if (kind[i] !== band.kind || offset[i] < 0 !== band.external) continue;
        at[lower[i]] += size[i];
        at[Math.min(upper[i], program.end)] -= size[i];
      }
      for (let t = 1; t <= program.end; t++) at[t] += at[t - 1];
      return at;
    });
    program.total = Float64Array.from({ length: program.end }, (_, t) => program.bands.reduce((sum, band) => sum + band[t], 0));
  }

  const peak = { bytes: -1 };
  for (const program of programs) {
    program.total.forEach((bytes, time) => {
      if (bytes > peak.bytes) Object.assign(peak, { bytes, program, time });
    });
  }
  const output = document.getElementById("bands-peak");
  output.textContent = `${format(peak.bytes)} in ${peak.program.name}, time ${peak.time}`;
  output.dataset.bytes = String(peak.bytes);

  // ---- words and figures
  function unitOf(bytes) {
    return [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]].find(([, size]) => bytes >= size) ?? ["B", 1];
  }
  function format(bytes) {
    const [unit, size] = unitOf(bytes);
    return size === 1 ? `${bytes} B` : `${(bytes / size).toFixed(3)} ${unit}`;
  }
  function niceStep(span, most) {
    const power = 10 ** Math.floor(Math.log10(span / most));
    return power * [1, 2, 5, 10].find((factor) => span / (power * factor) <= most);
  }
  const palette = new Map(); // the style sheet's colours, light or dark; asked for once a drawing
  function colour(name) {
    if (!palette.has(name)) palette.set(name, getComputedStyle(document.documentElement).getPropertyValue(`--${name.replaceAll(" ", "-")}`).trim());
    return palette.get(name);
  }
  const meaning = { kept: "kept from forward to backward", recomputed: "recomputed", temporary: "temporary", output: "output", scratch: "scratch of a kernel" };

  // ---- a picture: axes, a canvas, and marks above it that cost no redrawing
  class Plot {
    constructor(id, label, top, draw, pick) {
      Object.assign(this, { top, base: 0, draw, pick, host: document.getElementById(id) });
      this.canvas = this.add("canvas");
      this.canvas.tabIndex = 0;
      this.canvas.setAttribute("role", "img");
      this.canvas.setAttribute("aria-label", label);
      this.cursor = this.add("div", "cursor");
      this.range = this.add("div", "range");
      this.mark = this.add("div", "mark");
      this.listen();
    }
    add(tag, name = "") {
      const element = this.host.appendChild(document.createElement(tag));
      element.className = name;
      element.hidden = tag === "div";
      return element;
    }
    measure() {
      const { width, height } = this.host.getBoundingClientRect();
      this.width = Math.max(width - MARGIN.left - MARGIN.right, 40);
      this.height = Math.max(height - MARGIN.top - MARGIN.bottom, 40);
      const scale = window.devicePixelRatio || 1;
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
      this.pen = this.canvas.getContext("2d");
      this.pen.setTransform(scale, 0, 0, scale, 0, 0);
      this.pen.clearRect(0, 0, width, height);
    }
    x(program, time) {
      return MARGIN.left + ((axisOf(program, time) - view.from) / (view.to - view.from)) * this.width;
    }
    y(bytes) {
      return MARGIN.top + this.height * (1 - (bytes - this.base) / (this.top - this.base));
    }
    axisAt(x) {
      const share = Math.min(Math.max((x - MARGIN.left) / this.width, 0), 1);
      return view.from + share * (view.to - view.from);
    }
    bytesAt(y) {
      return this.base + (this.top - this.base) * (1 - (y - MARGIN.top) / this.height);
    }
    paint() {
      this.measure();
      const pen = this.pen;
      pen.font = "12px system-ui, sans-serif";
      this.grid();
      pen.save();
      pen.beginPath();
      pen.rect(MARGIN.left, MARGIN.top - 1, this.width, this.height + 1);
      pen.clip();
      this.draw(this, pen);
      pen.restore();
      this.times();
      this.strip();
    }
    grid() {
      const { pen } = this;
      const [unit, size] = unitOf(this.top);
      const step = niceStep((this.top - this.base) / size, 6);
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      for (let i = Math.ceil(this.base / size / step); i * step * size <= this.top; i++) {
        const y = this.y(i * step * size);
        pen.fillStyle = colour("rule");
        pen.fillRect(MARGIN.left, Math.round(y), this.width, 1);
        pen.fillStyle = colour("soft");
        pen.fillText(String(+(i * step).toPrecision(6)), MARGIN.left - 8, y);
      }
      pen.save();
      pen.translate(13, MARGIN.top + this.height / 2);
      pen.rotate(-Math.PI / 2);
      pen.textAlign = "center";
      pen.fillText(unit, 0, 0);
      pen.restore();
    }
    visible() {
      return programs.filter((p) => p.start < view.to && p.start + p.width > view.from);
    }
    times() {
      const { pen } = this;
      const right = MARGIN.left + this.width;
      const bottom = MARGIN.top + this.height;
      for (const program of this.visible()) {
        const from = Math.max(this.x(program, 0), MARGIN.left);
        const to = Math.min(this.x(program, program.end), right);
        pen.fillStyle = colour("soft");
        if (from > MARGIN.left) pen.fillRect(Math.round(from), MARGIN.top - 16, 1, this.height + 16);
        pen.textAlign = "left";
        pen.textBaseline = "alphabetic";
        pen.fillStyle = colour("ink");
        pen.fillText(program.name + (program.repeats === 1 ? "" : ` × ${program.repeats}`), from + 4, MARGIN.top - 8, Math.max(to - from - 4, 1));
        if (to - from < 40) continue;
        pen.textAlign = "center";
        pen.textBaseline = "top";
        pen.fillStyle = colour("soft");
        const span = ((to - from) / (this.x(program, program.end) - this.x(program, 0))) * program.end;
        const step = Math.max(1, niceStep(span, Math.max(1, (to - from) / 70)));
        for (let time = 0; time < program.end; time += step) {
          const x = this.x(program, time);
          if (x < MARGIN.left - 1 || x > to - 14) continue;
          pen.fillRect(Math.round(x), bottom, 1, 20);
          pen.fillText(String(time), Math.max(x, MARGIN.left + 4), bottom + 22);
        }
      }
      pen.textAlign = "center";
      pen.textBaseline = "top";
      pen.fillStyle = colour("soft");
      pen.fillText("time: index of the operator call", MARGIN.left + this.width / 2, bottom + 38);
    }
    strip() {
      const { pen } = this;
      const y = MARGIN.top + this.height + 4;
      pen.textAlign = "center";
      pen.textBaseline = "middle";
      for (const program of this.visible()) {
        const phase = program.nodes.phase;
        for (let from = 0, to; from < phase.length; from = to) {
          for (to = from + 1; to < phase.length && phase[to] === phase[from]; ) to++;
          const left = Math.max(this.x(program, from), MARGIN.left);
          const right = Math.min(this.x(program, to), MARGIN.left + this.width);
          if (right <= left) continue;
          const name = words[phase[from]];
          pen.fillStyle = colour(name === "recompute" ? "recomputed" : name);
          pen.fillRect(left, y, Math.max(right - left - (right - left > 4 ? 1 : 0), 0.5), 14);
          pen.fillStyle = name === "recompute" ? "#1d2127" : colour("ink");
          if (right - left > pen.measureText(name).width + 6) pen.fillText(name, (left + right) / 2, y + 7.5);
        }
      }
    }
    place(element, left, top, right, bottom) {
      const [from, to] = [Math.max(left, MARGIN.left), Math.min(right, MARGIN.left + this.width)];
      element.hidden = to < from;
      Object.assign(element.style, { left: `${from}px`, top: `${top}px`, width: `${to - from}px`, height: `${bottom - top}px` });
    }
    listen() {
      const { canvas } = this;
      let begun = null;
      const local = (event) => {
        const box = canvas.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      canvas.addEventListener("pointerdown", (event) => {
        begun = local(event)[0];
        if (event.isTrusted) canvas.setPointerCapture(event.pointerId);
      });
      canvas.addEventListener("pointermove", (event) => {
        const [x, y] = local(event);
        if (begun !== null && Math.abs(x - begun) > 4) {
          hide();
          this.place(this.range, Math.min(x, begun), MARGIN.top, Math.max(x, begun), MARGIN.top + this.height);
          return;
        }
        if (x < MARGIN.left || x > MARGIN.left + this.width || y < MARGIN.top - 20 || y > MARGIN.top + this.height + 20) return hide();
        show(this.pick(this, x, y), event.clientX, event.clientY);
      });
      canvas.addEventListener("pointerup", (event) => {
        const [x] = local(event);
        this.range.hidden = true;
        if (begun !== null && Math.abs(x - begun) > 4) look(this.axisAt(Math.min(x, begun)), this.axisAt(Math.max(x, begun)));
        begun = null;
      });
      canvas.addEventListener("pointercancel", () => { begun = null; this.range.hidden = true; });
      canvas.addEventListener("pointerleave", hide);
      canvas.addEventListener("blur", hide);
      canvas.addEventListener("dblclick", () => look(0, length));
      canvas.addEventListener("keydown", (event) => press(event, this));
    }
  }

  // ---- what is at a place
  const stayOf = (program, index) =>
    Object.fromEntries(Object.entries(program.stays).map(([key, column]) => [key, column[index]]));

  function aliveAt({ program, time }) {
    const { lower, upper } = program.stays;
    const found = [];
    for (let i = 0; i < lower.length; i++) if (lower[i] <= time && time < upper[i]) found.push(i);
    return found;
  }

  function pickBytes(plot, x, y) {
    const moment = momentOf(plot.axisAt(x));
    let bytes = plot.bytesAt(y);
    if (bytes < plot.base) return moment;
    for (const [b, band] of bands.entries()) {
      const size = moment.program.bands[b][moment.time];
      if (bytes >= size) {
        bytes -= size;
        continue;
      }
      if (band.kind === undefined) return { ...moment, band, size };
      for (const index of aliveAt(moment)) {
        const stay = stayOf(moment.program, index);
        if (stay.kind !== band.kind || stay.offset < 0 !== band.external) continue;
        if (bytes < stay.size) return { ...moment, stay };
        bytes -= stay.size;
      }
    }
    return moment;
  }

  function pickOffset(plot, x, y) {
    const moment = momentOf(plot.axisAt(x));
    const bytes = plot.bytesAt(y);
    const { offset, size } = moment.program.stays;
    const index = aliveAt(moment).find((i) => offset[i] >= 0 && offset[i] <= bytes && bytes < offset[i] + size[i]);
    return index === undefined ? moment : { ...moment, stay: stayOf(moment.program, index) };
  }

  // ---- the two drawings
  function hatch(pen, name) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 6;
    const brush = tile.getContext("2d");
    brush.fillStyle = colour(name);
    brush.fillRect(0, 0, 6, 6);
    brush.strokeStyle = colour("ground");
    brush.globalAlpha = 0.6;
    brush.lineWidth = 1.4;
    brush.beginPath();
    for (const shift of [-6, 0, 6]) {
      brush.moveTo(shift, 6);
      brush.lineTo(shift + 6, 0);
    }
    brush.stroke();
    return pen.createPattern(tile, "repeat");
  }

  // one sample for each time, or, where several times share a pixel, the one of them at which most is alive
  function samplesOf(plot, program) {
    const samples = [];
    const [first, last] = [momentOf(view.from), momentOf(view.to)];
    const from = first.program === program ? first.time : 0;
    const to = last.program === program ? last.time + 1 : program.end;
    for (let time = from; time < to; time++) {
      const [left, right] = [plot.x(program, time), plot.x(program, time + 1)];
      const open = samples.at(-1);
      if (open && right - open.left < 1) {
        open.right = right;
        if (program.total[time] > program.total[open.time]) open.time = time;
      } else samples.push({ left, right, time });
    }
    return samples;
  }

  function drawBytes(plot, pen) {
    const styles = bands.map((band) => (band.external ? hatch(pen, band.colour) : colour(band.colour)));
    for (const program of plot.visible()) {
      const samples = samplesOf(plot, program);
      const tops = samples.map(({ time }) => program.total[time]);
      for (let b = bands.length - 1; b >= 0; b--) {
        pen.fillStyle = styles[b];
        pen.beginPath();
        pen.moveTo(samples[0].left, plot.y(plot.base));
        samples.forEach(({ left, right }, i) => {
          const y = plot.y(Math.max(tops[i], plot.base));
          pen.lineTo(left, y);
          pen.lineTo(right, y);
        });
        pen.lineTo(samples.at(-1).right, plot.y(plot.base));
        pen.fill();
        samples.forEach(({ time }, i) => (tops[i] -= program.bands[b][time]));
      }
    }
    level(plot, pen, plan.peak, "ink", `peak ${format(plan.peak)}`, 5);
    if (plan.budget !== null && plan.budget <= plot.top) level(plot, pen, plan.budget, "budget", `budget ${format(plan.budget)}`, -6);
    else if (plan.budget !== null) note(plot, pen, MARGIN.top + 12, "budget", `budget ${format(plan.budget)}: above this picture`);
  }

  function level(plot, pen, bytes, name, text, shift) {
    const y = plot.y(bytes);
    pen.strokeStyle = colour(name);
    pen.setLineDash([6, 4]);
    pen.beginPath();
    pen.moveTo(MARGIN.left, y);
    pen.lineTo(MARGIN.left + plot.width, y);
    pen.stroke();
    pen.setLineDash([]);
    note(plot, pen, shift < 0 ? y + shift : y + 15, name, text);
  }

  function note(plot, pen, y, name, text) {
    pen.textAlign = "right";
    pen.textBaseline = "alphabetic";
    pen.fillStyle = colour("ground");
    const width = pen.measureText(text).width;
    pen.globalAlpha = 0.8;
    pen.fillRect(MARGIN.left + plot.width - width - 10, y - 11, width + 8, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = colour(name);
    pen.fillText(text, MARGIN.left + plot.width - 6, y);
  }

  function drawOffsets(plot, pen) {
    const fills = kinds.map(colour);
    const ground = colour("ground");
    pen.lineWidth = 1;
    for (const program of plot.visible()) {
      const { lower, upper, size, offset, kind } = program.stays;
      for (let i = 0; i < lower.length; i++) {
        if (offset[i] < 0) continue;
        const left = plot.x(program, lower[i]);
        const width = plot.x(program, upper[i]) - left;
        const top = plot.y(offset[i] + size[i]);
        const height = plot.y(offset[i]) - top;
        if (left + width < MARGIN.left || left > MARGIN.left + plot.width) continue;
        pen.fillStyle = fills[kind[i]];
        pen.fillRect(left, top, Math.max(width, 0.6), Math.max(height, 0.6));
        if (width < 3 || height < 3) continue;
        pen.strokeStyle = ground;
        pen.strokeRect(left, top, width, height);
      }
    }
  }

  // ---- tooltip, cursor, marks
  const tip = document.getElementById("tip");

  function hide() {
    tip.hidden = true;
    for (const plot of plots) plot.cursor.hidden = plot.mark.hidden = true;
  }

  function line(text, name = "") {
    if (!text) return;
    const element = tip.appendChild(document.createElement("div"));
    element.className = name;
    element.textContent = text;
  }

  function title(name, bytes, kind, external) {
    const element = tip.appendChild(document.createElement("div"));
    const swatch = element.appendChild(document.createElement("span"));
    swatch.className = external ? "swatch external" : "swatch";
    swatch.style.setProperty("--colour", `var(--${kind.replaceAll(" ", "-")})`);
    element.appendChild(document.createElement("b")).textContent = name;
    element.append(`  ${format(bytes)}`);
  }

  function describeStay(program, stay) {
    const kind = kinds[stay.kind];
    const { op, phase, module, source } = program.nodes;
    title(kind === "scratch" ? "scratch" : `%${stay.name}`, stay.size, kind, stay.offset < 0);
    const times = stay.again === 1 ? "once" : `${stay.again} times`;
    line(meaning[kind] + (stay.copy ? `, copy ${stay.copy} of ${stay.again}` : stay.again ? `; made again ${times}` : ""));
    line(words[module[stay.node]] ? `module ${words[module[stay.node]]}` : "outermost module");
    line(words[source[stay.node]]);
    line(`${words[phase[stay.node]]} ${words[op[stay.node]]}`);
    const where = stay.offset < 0 ? "allocated by its kernel" : `offset ${format(stay.offset)}`;
    line(`times ${stay.lower} to ${Math.max(stay.upper - 1, stay.lower)}, ${where}`);
  }

  function describe({ program, time, stay, band, size }) {
    tip.replaceChildren();
    if (stay) describeStay(program, stay);
    if (band) title(band.name, size, band.colour, false);
    const { op, phase, module, source } = program.nodes;
    const now = op.length ? [phase[time], op[time], module[time], source[time]].map((i) => words[i]).filter(Boolean).join(" ") : "nothing runs";
    line(`${program.name}, time ${time} of ${program.end}: ${now}`, "rest");
    line(`alive: ${format(program.total[time])}`, "rest");
  }

  function show(hit, clientX, clientY) {
    const { program, time, stay } = hit;
    describe(hit);
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    const [right, bottom] = [document.documentElement.clientWidth, document.documentElement.clientHeight];
    tip.style.left = `${Math.max(6, clientX + 16 + box.width > right ? clientX - 16 - box.width : clientX + 16)}px`;
    tip.style.top = `${Math.max(6, clientY + 16 + box.height > bottom ? clientY - 16 - box.height : clientY + 16)}px`;
    for (const plot of plots) {
      const [middle, low] = [plot.x(program, time + 0.5), MARGIN.top + plot.height];
      plot.place(plot.cursor, middle, MARGIN.top, middle + 1, low);
      if (stay && (plot === offsets ? stay.offset >= 0 : true)) {
        const [left, till] = [plot.x(program, stay.lower), plot.x(program, stay.upper)];
        if (plot === offsets) plot.place(plot.mark, left - 1, plot.y(stay.offset + stay.size) - 1, till + 1, plot.y(stay.offset) + 1);
        else plot.place(plot.mark, left, low + 3, Math.max(till, left + 2), low + 19);
      } else plot.mark.hidden = true;
    }
  }

  // ---- keyboard: a moment, and which of the tensors that are alive then
  const spot = { ...peak, rank: 0 };

  function press(event, plot) {
    const steps = event.shiftKey ? 10 : 1;
    const middle = axisOf(spot.program, spot.time + 0.5);
    const actions = {
      ArrowLeft: () => move(-steps),
      ArrowRight: () => move(steps),
      ArrowUp: () => (spot.rank = Math.max(spot.rank - 1, 0)),
      ArrowDown: () => (spot.rank += 1),
      "+": () => look(middle - (view.to - view.from) / 4, middle + (view.to - view.from) / 4),
      "-": () => look(middle - (view.to - view.from), middle + (view.to - view.from)),
      0: () => look(0, length),
      Escape: () => {},
    };
    const action = actions[event.key === "=" ? "+" : event.key];
    if (!action || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    action();
    if (event.key === "Escape") return hide();
    const sizes = spot.program.stays.size;
    const alive = aliveAt(spot).filter((i) => plot !== offsets || spot.program.stays.offset[i] >= 0).sort((a, b) => sizes[b] - sizes[a]);
    spot.rank = Math.min(spot.rank, Math.max(alive.length - 1, 0));
    const stay = alive.length ? stayOf(spot.program, alive[spot.rank]) : undefined;
    const box = plot.canvas.getBoundingClientRect();
    show({ ...spot, stay }, box.left + plot.x(spot.program, spot.time), box.bottom);
  }

  function move(steps) {
    let program = programs.indexOf(spot.program);
    let time = spot.time + steps;
    if (time < 0 && program > 0) time = programs[--program].end - 1;
    else if (time >= spot.program.end && program < programs.length - 1) [program, time] = [program + 1, 0];
    spot.program = programs[program];
    spot.time = Math.min(Math.max(time, 0), spot.program.end - 1);
    const axis = axisOf(spot.program, spot.time);
    if (axis < view.from || axis > view.to) look(axis - (view.to - view.from) / 2, axis + (view.to - view.from) / 2);
  }

  // ---- which stretch of the step is shown
  const button = document.getElementById("out");
  button.addEventListener("click", () => look(0, length));
  const without = document.getElementById("without");
  without.addEventListener("change", () => {
    bytes.base = without.checked ? plan.persistent.reduce((sum, [, size]) => sum + size, 0) : 0;
    hide();
    paint();
  });

  function look(from, to) {
    const width = Math.min(Math.max(to - from, 4), length);
    view.from = Math.min(Math.max(from, 0), length - width);
    view.to = view.from + width;
    const whole = width >= length;
    button.hidden = whole;
    const [first, last] = [momentOf(view.from), momentOf(view.to)];
    document.getElementById("view").textContent = whole
      ? ""
      : `${first.program.name} ${first.time} to ${last.program === first.program ? "" : `${last.program.name} `}${last.time}`;
    hide();
    paint();
  }

  function paint() {
    palette.clear();
    for (const plot of plots) plot.paint();
  }

  const mostArena = Math.max(1, ...programs.map(({ stays }) => stays.size.reduce((most, size, i) => (stays.offset[i] < 0 ? most : Math.max(most, stays.offset[i] + size)), 0)));
  const roof = plan.budget !== null && plan.budget <= 1.6 * plan.peak ? Math.max(plan.budget, plan.peak) : plan.peak;
  const described = "Hover or use the arrow keys to read tensors; the tables hold the figures.";
  const bytes = new Plot("bytes", `Bytes alive over the step, stacked by category. ${described}`, Math.max(roof, 1) * 1.1, drawBytes, pickBytes);
  const offsets = new Plot("offsets", `The arena as time by offset, one rectangle a tensor. ${described}`, mostArena * 1.02, drawOffsets, pickOffset);
  const plots = [bytes, offsets];
  let drawn = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth === drawn) return;
    if (drawn) hide();
    drawn = document.body.clientWidth;
    paint();
  }).observe(document.body);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
  paint();
})();
