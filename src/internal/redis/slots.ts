/** Which node of a Cluster serves which slot, as ioredis knows it. */

import type * as IoRedis from "ioredis"

export interface Place {
  readonly host: string
  readonly port: number
}

export const hostPort = (node: IoRedis.Redis): string => `${node.options.host}:${node.options.port}`

/** Where a node is that the cluster has this name for. */
const reachedBy = (client: IoRedis.Cluster, name: string): Place => {
  const known = client.nodes("master").find((node) => hostPort(node) === name)
  if (known !== undefined) return { host: known.options.host!, port: known.options.port! }
  const natMap = client.options.natMap
  const mapped = typeof natMap === "function" ? natMap(name) : natMap?.[name]
  if (mapped) return mapped
  const colon = name.lastIndexOf(":")
  return { host: name.slice(0, colon), port: Number(name.slice(colon + 1)) }
}

/** The master that serves this slot. */
export const ownerOf = (client: IoRedis.Cluster, slot: number): Place | undefined => {
  const name = client.slots[slot]?.[0]
  return name === undefined ? undefined : reachedBy(client, name)
}

/** The master that serves this slot, or else any: for each `turn` another one. */
export const nodeFor = (client: IoRedis.Cluster, slot: number | undefined, turn: number): Place | undefined => {
  const found = slot === undefined ? undefined : ownerOf(client, slot)
  if (found !== undefined) return found
  const masters = client.nodes("master")
  const sample = masters[turn % masters.length]?.options
  return sample === undefined ? undefined : { host: sample.host!, port: sample.port! }
}

/** Whether there is a connection to the master of every slot. */
export const isServed = (client: IoRedis.Cluster): boolean => {
  const connected = new Set(client.nodes("master").filter(({ status }) => status === "ready").map(hostPort))
  return [...new Set(client.slots.map((names) => names?.[0]))].every((name) => {
    if (name === undefined) return true
    const { host, port } = reachedBy(client, name)
    return connected.has(`${host}:${port}`)
  })
}
