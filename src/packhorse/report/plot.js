// A picture: axes, a canvas, and marks above it that cost no redrawing.
class Plot {
  // frame: (plot, program, stay) -> where its mark is, [left, top, right, bottom], or null
  constructor(id, label, top, draw, pick, frame) {
    Object.assign(this, { top, base: 0, draw, pick, frame, host: document.getElementById(id) });
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
