// The pictures of bytes: what is at a place in them, and how they are drawn.

// ---- what is at a place
const stayOf = (program, index, where = "stays") =>
  Object.fromEntries(Object.entries(program[where]).map(([key, column]) => [key, column[index]]));

function aliveAt({ program, time }, where = "stays") {
  const { lower, upper } = program[where];
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

// where: "stays" of the device, or the host's "pool"
const pickOffset = (where) => (plot, x, y) => {
  const moment = momentOf(plot.axisAt(x));
  const bytes = plot.bytesAt(y);
  const { offset, size } = moment.program[where];
  const index = aliveAt(moment, where).find((i) => offset[i] >= 0 && offset[i] <= bytes && bytes < offset[i] + size[i]);
  return index === undefined ? moment : { ...moment, stay: stayOf(moment.program, index, where) };
};

// ---- the mark of a tensor: its rectangle, or its times on the strip below
const rectangle = (where) => (plot, program, stay) => {
  if (stay.offset < 0 || (stay.kind === ON_HOST) !== (where === "pool")) return null;
  return [plot.x(program, stay.lower) - 1, plot.y(stay.offset + stay.size) - 1, plot.x(program, stay.upper) + 1, plot.y(stay.offset) + 1];
};

function stretch(plot, program, stay) {
  const [left, low] = [plot.x(program, stay.lower), MARGIN.top + plot.height];
  return [left, low + 3, Math.max(plot.x(program, stay.upper), left + 2), low + 19];
}

// ---- the drawings
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
  if (plan.host && plan.host <= plot.top) drawOnHost(plot, pen);
  level(plot, pen, plan.peak, "ink", `peak ${format(plan.peak)}`, 5);
  if (plan.budget !== null && plan.budget <= plot.top) level(plot, pen, plan.budget, "budget", `budget ${format(plan.budget)}`, -6);
  else if (plan.budget !== null) note(plot, pen, MARGIN.top + 12, "budget", `budget ${format(plan.budget)}: above this picture`);
}

// a line above the bands: what lies on the host is not part of their height
function drawOnHost(plot, pen) {
  for (const [style, width] of [["ground", 5], ["on the host", 2.5]]) {
    pen.strokeStyle = colour(style);
    pen.lineWidth = width;
    for (const program of plot.visible()) {
      if (!program.pool.size.length) continue;
      pen.beginPath();
      for (const { left, right, time } of samplesOf(plot, program)) {
        pen.lineTo(left, plot.y(program.onHost[time]));
        pen.lineTo(right, plot.y(program.onHost[time]));
      }
      pen.stroke();
    }
  }
  pen.lineWidth = 1;
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

const drawOffsets = (where) => (plot, pen) => {
  const fills = kinds.map(colour);
  const ground = colour("ground");
  pen.lineWidth = 1;
  for (const program of plot.visible()) {
    const { lower, upper, size, offset, kind } = program[where];
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
};
