#!/usr/bin/env bash
# slurm.sh - a real Slurm (slurmctld, munge, one slurmd per host) on the hosts that hosts.sh makes.
#
# Every host runs its own munged and slurmd; node1 also runs slurmctld. Two partitions share all hosts: `low`, the
# default, whose jobs are requeued when `high` needs the hosts, after a grace time.
set -u -o pipefail

HERE=$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")
LAB=${SLURM_LAB:-/tmp/mtrain-slurm-lab}            # one Slurm = one folder, which all hosts see
export HOSTS_STATE=$LAB/hosts HOSTS_SUBNET=${HOSTS_SUBNET:-10.77.0} HOSTS_MODE=root
export HOSTS_SHARE=${HOSTS_SHARE:+$HOSTS_SHARE:}$LAB
export PATH=$PATH:/usr/sbin:/sbin
GRACE_S=${SLURM_GRACE_S:-10}                       # from the first SIGTERM of a preemption to its second
KILL_WAIT_S=${SLURM_KILL_WAIT_S:-30}               # from SIGTERM to SIGKILL; 30 is Slurm's own default
SILENCE_S=${SLURM_SILENCE_S:-10}                   # after which slurmctld takes a silent slurmd for down
READY_S=${SLURM_READY_S:-30}                       # in which all hosts must become usable

usage() { cat <<EOF
usage: $(basename "$0") COMMAND
  up N                make node1 ... nodeN with a Slurm; again: repairs hosts and daemons that a fault has ended
  down                remove it: processes, network, state
  exec HOST CMD...    run CMD there: sbatch, srun, squeue, scancel, scontrol ...
  status              hosts and queue
  slurmd HOST up|down     start it, or kill -9
  ctld up|down            the same for slurmctld
  faults of hosts: HOSTS_STATE=$HOSTS_STATE $HERE/hosts.sh power|link|cut ...
partitions: low (default; its jobs are requeued for those of high, $GRACE_S s after SIGTERM), high
environment: SLURM_LAB=$LAB SLURM_GRACE_S=$GRACE_S SLURM_KILL_WAIT_S=$KILL_WAIT_S SLURM_SILENCE_S=$SILENCE_S SLURM_READY_S=$READY_S
  HOSTS_SHARE=dir:dir (folders under /tmp that all hosts see) HOSTS_SUBNET=$HOSTS_SUBNET
EOF
}
skip() { echo "slurm.sh: $*" >&2; exit 77; }
need() {
  local tool
  for tool in slurmctld slurmd munged; do
    command -v "$tool" >/dev/null || skip "$tool is not installed (Debian: apt-get install slurm-wlm munge)"; done
  [ "$(id -u)" = 0 ] || skip "needs root: slurmd starts every job as the user who submitted it"
}
on() { "$HERE/hosts.sh" exec "$1" env SLURM_CONF="$LAB/slurm.conf" "${@:2}"; }

configure() {  # N
  local number
  mkdir -p "$LAB"/{state,log}; chmod 755 "$LAB"; : >"$LAB/.made-by-slurm.sh"
  [ -f "$LAB/munge.key" ] || { head -c 1024 /dev/urandom >"$LAB/munge.key"; chmod 600 "$LAB/munge.key"; }
  # Namespaces of hosts have no cgroups of their own, so processes are tracked by their parents.
  echo "CgroupPlugin=cgroup/v1" >"$LAB/cgroup.conf"
  { cat <<EOF
ClusterName=lab
SlurmctldHost=node1($HOSTS_SUBNET.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A requeued job waits until credentials of its former start have expired: 120 s by default.
AuthInfo=socket=/run/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation=$LAB/state
SlurmdSpoolDir=/run/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=$LAB/log/slurmctld.log
SlurmdLogFile=$LAB/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
# A host that comes back is used again by itself.
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=$SILENCE_S
KillWait=$KILL_WAIT_S
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=low Nodes=ALL Default=YES MaxTime=60 PriorityTier=1 GraceTime=$GRACE_S
PartitionName=high Nodes=ALL MaxTime=60 PriorityTier=2 PreemptMode=OFF
EOF
    for number in $(seq "$1"); do
      echo "NodeName=node$number NodeAddr=$HOSTS_SUBNET.$number CPUs=4 RealMemory=4000 State=UNKNOWN"; done
  } >"$LAB/slurm.conf"
}
start_munge() {
  on "$1" bash -c "munge -n -S /run/munge.sock >/dev/null 2>&1 || { mkdir -p -m 755 /run/m; munged --force \
    --key-file=$LAB/munge.key --socket=/run/munge.sock --pid-file=/run/m/pid --log-file=/run/m/log --seed-file=/run/m/seed; }"
}
running() { on "$1" bash -c "[ -s /run/$2.pid ] && kill -0 \$(cat /run/$2.pid) 2>/dev/null"; }
start_slurmd() { start_munge "$1"; running "$1" slurmd || on "$1" slurmd -N "$1"; }
start_ctld() { start_munge node1; running node1 slurmctld || on node1 slurmctld; }
wait_ready() {  # N: until every host is usable; a host that a fault or a test has taken out is brought back
  local number
  local until=$((SECONDS + READY_S))
  while [ "$SECONDS" -lt "$until" ]; do
    [ "$(on node1 sinfo -h -N -p low -t idle,alloc,mix -o %N 2>/dev/null | sort -u | wc -l)" = "$1" ] && return
    for number in $(seq "$1"); do on node1 scontrol update nodename="node$number" state=resume; done >/dev/null 2>&1
    sleep 0.2
  done
  on node1 sinfo -N -l >&2; echo "slurm.sh: not all hosts became usable within $READY_S s; see $LAB/log" >&2; exit 1
}

case ${1:-} in
  up) need; number=${2:?how many hosts}; mkdir -p "$LAB"; [ -f "$LAB/slurm.conf" ] || configure "$number"
      "$HERE/hosts.sh" up "$number" || exit
      start_ctld
      for each in $(seq "$number"); do start_slurmd "node$each" & done; wait
      wait_ready "$number" ;;
  down) "$HERE/hosts.sh" down; [ ! -f "$LAB/.made-by-slurm.sh" ] || rm -rf "$LAB" ;;
  exec) on "${@:2}" ;;
  status) on node1 sinfo -N -l && on node1 squeue ;;
  ctld) case $2 in down) on node1 bash -c 'kill -9 $(cat /run/slurmctld.pid)';; up) start_ctld;; esac ;;
  slurmd) case $3 in down) on "$2" bash -c 'kill -9 $(cat /run/slurmd.pid)';; up) start_slurmd "$2";; esac ;;
  *) usage; [ "${1:-}" = help ] ;;
esac
