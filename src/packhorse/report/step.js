// The plan of the page: its time axis, its bands, and figures in words.

const plan = JSON.parse(document.getElementById("plan").textContent);
const { kinds, words, programs } = plan;
const ON_HOST = kinds.length - 1; // in the host's pool, and in no band
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
  ...kinds.slice(0, ON_HOST).map((name, kind) => ({ name, colour: name, kind, external: false })),
  ...kinds.slice(0, ON_HOST).map((name, kind) => ({ name, colour: name, kind, external: true })),
];
function bytesOver(program, { lower, upper, size }, counts) {
  const at = new Float64Array(program.end + 1);
  for (let i = 0; i < lower.length; i++) {
    if (!counts(i)) continue;
    at[lower[i]] += size[i];
    at[Math.min(upper[i], program.end)] -= size[i];
  }
  for (let t = 1; t <= program.end; t++) at[t] += at[t - 1];
  return at;
}
for (const program of programs) {
  const { offset, kind } = program.stays;
  program.bands = bands.map((band) =>
    band.kind === undefined
      ? new Float64Array(program.end + 1).fill(band.bytes)
      : bytesOver(program, program.stays, (i) => kind[i] === band.kind && offset[i] < 0 === band.external),
  );
  program.onHost = bytesOver(program, program.pool, () => true);
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
const meaning = {
  kept: "kept from forward to backward",
  recomputed: "recomputed",
  slice: "slice of a saved value, this rank's part",
  leaving: "saved value, until it leaves",
  back: "saved value that came back",
  gathered: "gathered parameters",
  temporary: "temporary",
  output: "output",
  scratch: "scratch of a kernel",
  "on the host": "saved value on the host",
};
