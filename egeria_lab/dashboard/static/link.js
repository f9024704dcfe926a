// The page's end of the wire: says hello, asks again after a gap, acknowledges at most twice a second.

const HELLO_AGAIN_MS = 2000;
const ANSWER_MS = 500;
const CLOSED = new Error("the view was closed");
const PLOTLY_SLOT = "__egeria_lab_plotly__";

// A DataView may start anywhere in a shared buffer: copy, so that typed arrays are aligned.
const bytesOf = (view) => view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);

const bytesOfText = (text) => Uint8Array.from(atob(text), (char) => char.charCodeAt(0)).buffer;

async function unpackPlotly(packed) {
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const code = await new Response(stream).text();
  const module = { exports: {} };
  new Function("module", "exports", "define", code)(module, module.exports, undefined);
  return module.exports;
}

class Link {
  constructor(model, { onFrame, onSilence, onAnswer }) {
    this.model = model;
    this.view = Math.random().toString(36).slice(2, 10);
    this.onFrame = onFrame;
    this.onSilence = onSilence;
    this.onAnswer = onAnswer;
    this.visible = true;
    this.hz = matchMedia("(prefers-reduced-motion: reduce)").matches ? 1 : 4;
    this.waitingSince = null;
    this.asText = false;
    this.greeted = this.wantsPlotly = false;
    this.numRequests = 0;
    this.answer = null;
    this.receive = this.receive.bind(this);
    model.on("msg:custom", this.receive);
  }

  send(content) {
    try {
      this.model.send({ view: this.view, visible: this.visible, hz: this.hz, ...content });
    } catch (error) {
      console.debug("egeria-lab: no kernel to talk to", error);
    }
  }

  hello() {
    if (this.waitingSince === null) this.waitingSince = performance.now();
    clearTimeout(this.helloTimer);
    this.send({ kind: "hello", as_text: this.asText, plotly: this.wantsPlotly });
    this.greeted = true;
    this.wantsPlotly = false;
    this.helloTimer = setTimeout(() => {
      if (this.waitingSince === null) return;
      this.onSilence(performance.now() - this.waitingSince);
      this.hello();
    }, HELLO_AGAIN_MS);
  }

  receive(content, views) {
    if (content.kind === "answer" || content.kind === "explained") {
      if (content.view === this.view) this.onAnswer(content);
      return;
    }
    if (content.kind !== "frame" && content.kind !== "plotly") return;
    const expected = content.kind === "plotly" ? 1 : 2 * content.parts.length;
    const raw = content.text ? content.text.map(bytesOfText) : (views || []).map(bytesOf);
    if (raw.length < expected) {
      this.asText = true;
      if (content.kind === "plotly") this.askPlotly();
      else this.hello();
      return;
    }
    if (content.kind === "plotly") {
      this.plotlyArrived?.(raw[0]);
      return;
    }
    if (content.full) this.waitingSince = null;
    if (!this.onFrame(content, raw) && this.waitingSince === null) this.hello();
  }

  // Tell the kernel that frame `seq` is on screen and what drawing it cost.
  acknowledge(seq, drawMs) {
    this.answer = { kind: "ack", seq, draw_ms: Math.round(10 * drawMs) / 10 };
    if (this.answerTimer) return;
    const wait = Math.max(0, (this.answeredAt || 0) + ANSWER_MS - performance.now());
    this.answerTimer = setTimeout(() => {
      this.answerTimer = null;
      this.answeredAt = performance.now();
      this.send(this.answer);
    }, wait);
  }

  show(visible) {
    if (visible === this.visible) return;
    this.visible = visible;
    this.send({ kind: "view" });
  }

  // Ask for something; returns the number under which its fate is reported.
  request(wish) {
    const number = `${this.view}-${++this.numRequests}`;
    this.send({ kind: "do", number, ...wish });
    return number;
  }

  askPlotly() {
    this.send({ kind: "plotly", as_text: this.asText });
  }

  // plotly.js comes from the kernel once a page and is kept for every later view. When the view that asked is
  // closed before it came, one of those that wait asks instead.
  plotly() {
    window[PLOTLY_SLOT] ??= new Promise((resolve, reject) => {
      const again = setInterval(() => this.askPlotly(), 10000);
      this.plotlyArrived = (packed) => {
        clearInterval(again);
        this.plotlyArrived = null;
        unpackPlotly(packed).then(resolve, reject);
      };
      this.stopAsking = () => {
        clearInterval(again);
        if (!this.plotlyArrived) return;
        delete window[PLOTLY_SLOT];
        reject(CLOSED);
      };
      if (this.greeted) this.askPlotly();
      else this.wantsPlotly = true; // hello says so: a second message might find the kernel busy with the next cell
    });
    return window[PLOTLY_SLOT].catch((error) => {
      if (error === CLOSED && !this.closed) return this.plotly();
      throw error;
    });
  }

  close() {
    this.closed = true;
    clearTimeout(this.helloTimer);
    clearTimeout(this.answerTimer);
    this.stopAsking?.();
    this.model.off("msg:custom", this.receive);
    this.send({ kind: "bye" });
  }
}
