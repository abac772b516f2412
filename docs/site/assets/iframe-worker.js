// SPDX-License-Identifier: Apache-2.0
// Browsers start no workers on pages opened from the disk, and the theme's search is a worker. This runs it in a frame.
if (location.protocol === "file:") {
  class IFrameWorker extends EventTarget {
    onmessage = null
    onerror = null
    #frame = document.createElement("iframe")
    #waiting = []  // messages sent before the script was loaded

    constructor(url) {
      super()
      this.#frame.hidden = true
      document.body.append(this.#frame)
      const inside = this.#frame.contentWindow
      inside.postMessage = data => this.#tell(this, data)
      inside.importScripts = (...scripts) => scripts.reduce((done, source) => done.then(() => this.#run(source)), Promise.resolve())
      this.#run(url).then(() => {
        for (const data of this.#waiting.splice(0)) this.#tell(inside, data)
        this.#waiting = null
      })
    }

    #run(source) {
      return new Promise((done, failed) => {
        const script = this.#frame.contentDocument.createElement("script")
        script.src = source
        script.onload = done
        script.onerror = failed
        this.#frame.contentDocument.body.append(script)
      })
    }

    #tell(whom, data) {
      const event = new MessageEvent("message", {data})
      whom.dispatchEvent(event)
      if (whom === this) this.onmessage?.(event)
    }

    postMessage(data) {
      if (this.#waiting) this.#waiting.push(data)
      else this.#tell(this.#frame.contentWindow, data)
    }

    terminate() {
      this.#frame.remove()
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker
}
