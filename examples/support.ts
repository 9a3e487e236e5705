/**
 * Where the examples find Redis: the server that REDIS_URL names, or else a private one that ends with the program. On a server of
 * yours, some of them leave state behind, in a namespace of their own.
 */
import { Layer } from "effect"
import { Coordinator, Redis } from "../src/index.ts"

export const layer = (options?: Coordinator.Options) =>
  Coordinator.layer({ namespace: `example-${process.pid}`, ...options }).pipe(
    Layer.provideMerge(process.env["REDIS_URL"] ? Redis.layerConfig() : Redis.layerEmbedded())
  )
