import { defineConfig } from "vitest/config"

export default defineConfig({
  test: {
    include: ["test/**/*.test.ts"],
    pool: "forks",
    // Each file starts its own Redis. More files at once than this only adds scheduling delay on a two-core machine.
    maxWorkers: 2,
    // A test that waits for a lease to lapse, or for a failover, takes seconds; one that hangs should still end.
    testTimeout: 60_000,
    hookTimeout: 60_000
  }
})
