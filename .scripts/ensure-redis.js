// Makes sure that a Redis (or Valkey) server can be started, before the tests or the demo start one.
//
// Says nothing when REDIS_URL names a running server or when a server program is on PATH. Otherwise installs one with the
// system's package manager, or stops with the command to type. Plain JavaScript without dependencies, since it has to
// explain itself on a Node that is too old to run anything else here.
import { spawnSync } from "node:child_process"
import { accessSync, constants, statSync } from "node:fs"
import { delimiter, join } from "node:path"

const servers = ["redis-server", "valkey-server"]

// On Debian and Ubuntu, installing the package also starts the server on port 6379, now and at every boot, which nobody
// asked for. policy-rc.d is Debian's switch for "start nothing"; one that is already there (Docker images have it) stays.
const apt = `
  export DEBIAN_FRONTEND=noninteractive
  policy=/usr/sbin/policy-rc.d
  if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\\nexit 101\\n' > "$policy" && chmod 755 "$policy"
  fi
  apt-get update
  apt-get install --yes --no-install-recommends -o DPkg::Lock::Timeout=120 redis-server || exit
  if [ -d /run/systemd/system ]; then systemctl disable redis-server.service || true; fi
`

// In the order in which they are tried. `run` is what the script runs, `type` what a person is told to type.
const managers = [
  { name: "apt-get", root: true, run: apt, type: "apt-get update && apt-get install --yes redis-server" },
  // Fedora 41 and later, and Enterprise Linux 10, have Valkey in place of Redis.
  {
    name: "dnf",
    root: true,
    run: "dnf install --assumeyes valkey || dnf install --assumeyes redis",
    type: "dnf install --assumeyes valkey"
  },
  { name: "apk", root: true, run: "apk add --no-cache redis", type: "apk add redis" },
  { name: "brew", root: false, run: "brew install redis", type: "brew install redis" }
]

checkNode()
if (!process.env.REDIS_URL && !servers.some(onPath)) install()

function checkNode() {
  const [major = 0, minor = 0] = process.versions.node.split(".").map(Number)
  if (major > 22 || (major === 22 && minor >= 19)) return
  stop(
    `Node 22.19 or later is needed, and this is ${process.version}.`,
    "`npm ci` puts one into node_modules, and `npm test` and `npm run demo` use it, unless npm was told not to run",
    "install scripts. Run `npm ci --ignore-scripts=false`, or install a newer Node."
  )
}

function install() {
  const manager = managers.find(({ name }) => onPath(name))
  if (manager === undefined) {
    stop(
      "Neither redis-server nor valkey-server is on PATH, nor is a package manager that this script knows.",
      "Install Redis 7 or later (https://redis.io/docs/latest/operate/oss_and_stack/install/), or set REDIS_URL."
    )
  }
  const isRoot = process.getuid?.() === 0
  const asRoot = manager.root && !isRoot
  const hint = asRoot ? `${onPath("sudo") ? "sudo sh" : "su"} -c '${manager.type}'` : manager.type
  const advice = ["Type this and start again, or set REDIS_URL to a running server:", "", `  ${hint}`, ""]
  if (asRoot && !onPath("sudo")) {
    stop("Neither redis-server nor valkey-server is on PATH, and only root can install one.", ...advice)
  }

  console.error(`Neither redis-server nor valkey-server is on PATH: installing one with ${manager.name}.`)
  // Without a terminal nobody can type a password, and sudo would wait for one.
  const sudo = process.stdin.isTTY ? ["sudo"] : ["sudo", "-n"]
  const [command = "sh", ...args] = [...(asRoot ? sudo : []), "sh", "-c", manager.run]
  const { error, signal, status } = spawnSync(command, args, { stdio: "inherit" })
  if (status !== 0) {
    stop(`The installation failed (${error?.message ?? signal ?? `exit code ${status}`}).`, ...advice)
  }
  if (!servers.some(onPath)) {
    stop(`${manager.name} has installed Redis, but redis-server is still not on PATH.`, "Add its folder to PATH.")
  }
}

/** @param {string} program */
function onPath(program) {
  return (process.env.PATH ?? "").split(delimiter).some((folder) => {
    const file = join(folder, program)
    try {
      accessSync(file, constants.X_OK)
      return statSync(file).isFile()
    } catch {
      return false
    }
  })
}

/**
 * @param {Array<string>} lines
 * @returns {never}
 */
function stop(...lines) {
  console.error(lines.join("\n"))
  process.exit(1)
}
