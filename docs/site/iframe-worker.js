// The search runs in a Worker, which browsers refuse to start for a page that is read from the disk. There it runs in a
// hidden frame instead. A page from a server is left alone.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.frame = frame
      frame.contentWindow.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const load = one => new Promise((resolve, reject) => {
        const script = Object.assign(frame.contentDocument.createElement("script"), { src: one })
        script.onload = resolve
        script.onerror = reject
        frame.contentDocument.body.append(script)
      })
      frame.contentWindow.importScripts = (...urls) => urls.reduce((before, one) => before.then(() => load(one)), Promise.resolve())
      this.loaded = load(new URL(url, location))
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
