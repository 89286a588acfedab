// Tooltip, cursor and marks; pointer, keys, and the stretch of the step that is shown. What comes from the user is written as text, never as HTML.

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
  const where = stay.offset < 0 ? "allocated by its kernel" : `offset ${format(stay.offset)}${stay.kind === ON_HOST ? " of the host's pool" : ""}`;
  line(`times ${stay.lower} to ${Math.max(stay.upper - 1, stay.lower)}, ${where}`);
}

function describeEvent(program, event) {
  const { stream, name, node, begin, end, bytes } = program.line;
  const { op, phase, module, source } = program.nodes;
  const kind = streams[stream[event]];
  title(name[event], bytes[event], kind, false);
  line(`${kind}: ${inSeconds(end[event] - begin[event])}, from ${inSeconds(begin[event])} to ${inSeconds(end[event])} of ${program.name}`);
  line(`started by ${[phase, op, module, source].map((column) => words[column[node[event]]]).filter(Boolean).join(" ")}, time ${node[event]}`);
}

function describe({ program, time, stay, band, size, event, timed }) {
  tip.replaceChildren();
  if (event !== undefined) describeEvent(program, event);
  if (stay) describeStay(program, stay);
  if (band) title(band.name, size, band.colour, false);
  const { op, phase, module, source } = program.nodes;
  const now = op.length ? [phase[time], op[time], module[time], source[time]].map((i) => words[i]).filter(Boolean).join(" ") : "nothing runs";
  line(`${program.name}, time ${time} of ${program.end}: ${now}`, "rest");
  if (timed) line(`${inSeconds(program.line.positions[time])} of ${program.name}${waitsAt(program, time) ? ": the computation waits" : ""}`, "rest");
  line(`alive: ${format(program.total[time])}${plan.host ? `; on the host: ${format(program.onHost[time])}` : ""}`, "rest");
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
    const frame = stay ? plot.frame(plot, program, stay) : null;
    if (frame) plot.place(plot.mark, ...frame);
    else plot.mark.hidden = true;
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
  const where = plot.host.id === "pool" ? "pool" : "stays";
  const { size, offset } = spot.program[where];
  const alive = aliveAt(spot, where).filter((i) => plot !== offsets || offset[i] >= 0).sort((a, b) => size[b] - size[a]);
  spot.rank = Math.min(spot.rank, Math.max(alive.length - 1, 0));
  const stay = alive.length ? stayOf(spot.program, alive[spot.rank], where) : undefined;
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
const bytes = new Plot("bytes", `Bytes alive over the step, stacked by category. ${described}`, Math.max(roof, 1) * 1.1, drawBytes, pickBytes, stretch);
const arena = [drawOffsets("stays"), pickOffset("stays"), rectangle("stays")];
const offsets = new Plot("offsets", `The arena as time by offset, one rectangle a tensor. ${described}`, mostArena * 1.02, ...arena);
const plots = [bytes, offsets];
if (document.getElementById("pool")) {
  const pool = [drawOffsets("pool"), pickOffset("pool"), rectangle("pool")];
  plots.push(new Plot("pool", `The host's pool as time by offset, one rectangle a tensor. ${described}`, plan.host * 1.02, ...pool));
}
if (document.getElementById("line")) plots.push(new TimeLine("line", `Computation and what runs beside it, over predicted seconds. ${described}`));
let drawn = 0;
new ResizeObserver(() => {
  if (document.body.clientWidth === drawn) return;
  if (drawn) hide();
  drawn = document.body.clientWidth;
  paint();
}).observe(document.body);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
paint();
