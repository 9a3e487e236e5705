import { Effect, Tracer } from "effect"

/** Records the spans of what runs under it. */
export const recording = () => {
  const spans: Array<Tracer.NativeSpan> = []
  const tracer = Tracer.make({
    span: (options) => {
      const span = new Tracer.NativeSpan(options)
      spans.push(span)
      return span
    }
  })
  return { spans, traced: Effect.provideService(Tracer.Tracer, tracer) }
}
