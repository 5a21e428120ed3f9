#!/usr/bin/env bash
# A throw-away Slurm of one node, for tests.
#
#   slurm_local.sh check        exit 0 if its programs are installed, 3 (and one line why) if not
#   slurm_local.sh install      installs Debian's packages (as root)
#   slurm_local.sh start DIR    munged, slurmctld and slurmd under DIR; returns once the node is idle
#   slurm_local.sh stop DIR     cancels its jobs and ends the processes it started, no others
#
# Needs no systemd, no cgroups and no database: tried with Debian 12's slurm 22.05.8 and munge 0.5.15. `export
# SLURM_CONF=DIR/slurm.conf` makes the client programs speak to it. munged wants every folder above DIR to be
# executable by all, and none writable by others unless it is sticky: mktemp -d is fine, a folder below one of mode
# 700 is not. Environment: SLURM_LOCAL_CPUS (nproc), SLURM_LOCAL_GPUS (0; they are names only), SLURM_LOCAL_KILLWAIT (5),
# SLURM_LOCAL_OPTIONS (one more line of slurm.conf).
set -u
PATH=$PATH:/usr/sbin:/sbin
PKGS="slurmctld slurmd slurm-client munge"
die() { echo "slurm_local: $*" >&2; exit 1; }

check() {
  local b miss=""
  for b in munged munge slurmctld slurmd sbatch srun scontrol sinfo squeue scancel; do
    command -v "$b" >/dev/null || miss="$miss $b"
  done
  [ -z "$miss" ] || { echo "slurm_local: missing:$miss (apt-get install -y --no-install-recommends $PKGS)"; return 3; }
}

install() {
  check >/dev/null && return 0
  [ "$(id -u)" = 0 ] || die "install needs root"
  export DEBIAN_FRONTEND=noninteractive
  apt-get update -qq && apt-get install -y -qq --no-install-recommends $PKGS >/dev/null || die "apt-get failed"
  check
}

free_ports() {  # two free TCP ports on 127.0.0.1
  python3 - <<'P'
import socket
s = [socket.socket() for _ in range(2)]
for x in s: x.bind(("127.0.0.1", 0))
print(*[x.getsockname()[1] for x in s])
P
}

write_conf() {
  local d=$1 host cpus gpus ports
  host=$(hostname -s); cpus=${SLURM_LOCAL_CPUS:-$(nproc)}; gpus=${SLURM_LOCAL_GPUS:-0}
  read -r -a ports <<<"$(free_ports)"
  cat >"$d/slurm.conf" <<C
ClusterName=local
SlurmctldHost=$host(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
AuthInfo=socket=$d/munge/sock
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
StateSaveLocation=$d/state
SlurmdSpoolDir=$d/spool
SlurmctldPidFile=$d/run/slurmctld.pid
SlurmdPidFile=$d/run/slurmd.pid
SlurmctldLogFile=$d/log/slurmctld.log
SlurmdLogFile=$d/log/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_min_interval=200000,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=${SLURM_LOCAL_KILLWAIT:-5}
${SLURM_LOCAL_OPTIONS:-}
MinJobAge=3600
ReturnToService=2
SlurmdParameters=config_overrides
C
  local gres=""
  if [ "$gpus" -gt 0 ]; then
    echo "GresTypes=gpu" >>"$d/slurm.conf"; gres=" Gres=gpu:$gpus"
    # Slurm sets CUDA_VISIBLE_DEVICES only if each GPU has a File=; any character device will do
    local i; for i in $(seq 0 $((gpus - 1))); do
      [ -e "$d/run/fakegpu$i" ] || mknod "$d/run/fakegpu$i" c 1 3 2>/dev/null || ln -s /dev/null "$d/run/fakegpu$i"
    done
    echo "Name=gpu File=$d/run/fakegpu[0-$((gpus - 1))]" >"$d/gres.conf"
  fi
  cat >>"$d/slurm.conf" <<C
NodeName=$host NodeAddr=127.0.0.1 CPUs=$cpus$gres
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
C
}

spawn() {  # spawn NAME cmd... : detached, pid recorded, outlives the script
  local name=$1 d=$D; shift
  setsid nohup "$@" </dev/null >"$d/log/$name.out" 2>&1 &
  echo $! >"$d/run/$name.mypid"
}

alive() { [ -n "${1:-}" ] && [ -d "/proc/$1" ] && [ "$(cut -d' ' -f3 "/proc/$1/stat" 2>/dev/null)" != Z ]; }

start() {
  D=$(mkdir -p "$1" && cd "$1" && pwd) || die "cannot make $1"
  check || exit 3
  [ ! -e "$D/run/slurmctld.mypid" ] || die "$D is already in use; stop it first"
  chmod 755 "$D"; mkdir -p "$D"/{munge,state,spool,log,run}
  chmod 711 "$D/munge"
  (umask 077; head -c 1024 /dev/urandom >"$D/munge/key")
  write_conf "$D"
  export SLURM_CONF=$D/slurm.conf
  spawn munged munged -F --key-file="$D/munge/key" --socket="$D/munge/sock" --pid-file="$D/munge/pid" \
        --log-file="$D/log/munged.log" --seed-file="$D/munge/seed"
  local i; for i in $(seq 50); do [ -S "$D/munge/sock" ] && munge -n -S "$D/munge/sock" >/dev/null 2>&1 && break; sleep .1; done
  [ -S "$D/munge/sock" ] || { cat "$D/log/munged.out" >&2; stop "$D"; die "munged did not come up"; }
  spawn slurmctld slurmctld -D -i -f "$SLURM_CONF"
  spawn slurmd    slurmd -D -f "$SLURM_CONF"
  for i in $(seq 150); do
    [ "$(sinfo -h -p main -o %t 2>/dev/null)" = idle ] && { echo "slurm_local: ready in $D"; return 0; }
    alive "$(cat "$D/run/slurmctld.mypid")" && alive "$(cat "$D/run/slurmd.mypid")" || break
    sleep .2
  done
  tail -n 15 "$D"/log/slurmctld.log >&2; tail -n 15 "$D"/log/slurmd.log >&2
  stop "$D"; die "the node did not become idle"
}

stop() {
  D=$(cd "$1" 2>/dev/null && pwd) || return 0
  export SLURM_CONF=$D/slurm.conf
  local p n i
  p=$(cat "$D/run/slurmctld.mypid" 2>/dev/null)
  if alive "$p"; then
    timeout 10 scancel -u "$(id -un)" 2>/dev/null
    for i in $(seq 60); do [ -z "$(timeout 5 squeue -h 2>/dev/null)" ] && break; sleep .2; done
  fi
  # steps still alive: only those whose environment names this slurm.conf are killed
  for p in $(pgrep -x slurmstepd); do
    alive "$p" || continue
    { tr '\0' '\n' <"/proc/$p/environ" | grep -qxF "SLURM_CONF=$SLURM_CONF"; } 2>/dev/null && kill -KILL "$p" 2>/dev/null
  done
  for n in slurmd slurmctld munged; do
    p=$(cat "$D/run/$n.mypid" 2>/dev/null) || continue
    # signal the pid only if its command line still names this directory
    if alive "$p" && tr '\0' ' ' <"/proc/$p/cmdline" | grep -qF "$D/"; then
      kill -TERM "$p"
      for i in $(seq 50); do alive "$p" || break; sleep .1; done
      alive "$p" && kill -KILL "$p"
    fi
    rm -f "$D/run/$n.mypid"
  done
}

case ${1:-} in
  check|install) "$1" ;;
  start|stop) [ -n "${2:-}" ] || die "which DIR?"; "$1" "$2" ;;
  *) sed -n '2,8p' "$0"; exit 2 ;;
esac
