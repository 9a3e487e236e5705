// `npm run check`: everything that can be said about the code without running it, which is every script in package.json
// named `check:...`. All of them run even when one fails, so that a single run shows all there is to mend.
import { spawnSync } from "node:child_process"
import manifest from "../package.json" with { type: "json" }

const checks = Object.keys(manifest.scripts).filter((name) => name.startsWith("check:"))
const failed = checks.filter((name) => {
  console.log(`\n== ${name}`)
  return spawnSync("npm", ["run", "--silent", name], { stdio: "inherit" }).status !== 0
})

console.log(failed.length === 0 ? "\nAll checks passed." : `\nFailed: ${failed.join(", ")}`)
process.exitCode = failed.length === 0 ? 0 : 1
