#!/usr/bin/env bash
# hosts.sh - N small "hosts" on this one Linux machine, for testing multi-node launchers.
#
# Every host is a set of kernel namespaces of its own: network (own eth0, own address, own
# loopback, own ports), UTS (own hostname), PID (its own process list; "power off" kills exactly
# its processes), IPC, and mount (private /tmp, /var/tmp, /run, /dev/shm, /etc and HOME), with an
# own sshd on port 22 (key only).  The hosts hang on one bridge, which lives in a network
# namespace of its own ("hub"), so nothing at all appears among this machine's interfaces,
# routes, firewall rules, named netns, /etc or /run: any number of labs can run side by side
# (one state folder each), all with the same addresses.
#
# As root it uses the privileges it has; otherwise (or with HOSTS_MODE=user) it does the same
# inside an unprivileged user namespace.  Without either it says so and exits 77 ("skip").
set -u -o pipefail

ME=$(readlink -f "${BASH_SOURCE[0]}")
STATE=${HOSTS_STATE:-$(dirname "$ME")/state}     # one lab = one state folder
SUBNET=${HOSTS_SUBNET:-10.77.0}                  # hosts get $SUBNET.1 ... $SUBNET.N
PREFIX=${HOSTS_PREFIX:-node}                     # host names: node1 ... nodeN
SHARE=${HOSTS_SHARE:-}                           # a:b:c  folders under /tmp etc. all hosts see
MODE=${HOSTS_MODE:-auto}                         # auto | root | user
HOSTSFILE=${HOSTS_HOSTSFILE:-good}               # good | debian (own name -> 127.0.1.1) | none
HOSTS_WAIT=${HOSTS_WAIT:-30}                     # seconds to wait for a host to boot
KNOWN=${HOSTS_KNOWN:-0}                          # each host knows the cards of hosts 1..KNOWN for good
PRIVATE=(/tmp /var/tmp /run /dev/shm)            # replaced by an empty tmpfs on each host
export PATH=$PATH:/usr/sbin:/sbin

usage() {
cat <<EOF
usage: $(basename "$ME") COMMAND
  up N              make hosts ${PREFIX}1..${PREFIX}N ($SUBNET.1 ...); again: repairs or adds, keeps what runs
  down              remove this lab (processes, network, state); again: nothing to do, still 0
  status            what is up, one line a host; exit 0 only if every host answers
  exec HOST CMD...  run CMD on HOST (exit status is CMD's); HOST "hub" = a machine on the same
                    network that is not one of the hosts (address $SUBNET.254)
  shell HOST        interactive shell there
  link HOST down|up       the cable: carrier lost / back
  cut HOST on|off         the switch port drops everything, silently (carrier stays)
  tc HOST QDISC ARGS|off  shape what goes to HOST: "tbf rate 100mbit burst 64k latency 50ms",
                          "netem delay 5ms loss 1%" (where the kernel has netem)
  sshd HOST stop|start    HOST refuses ssh / accepts it again
  power HOST off|halt     HOST dies with everything on it: off = nobody is told (the cable goes
                          first), halt = its connections are closed; "up N" boots it again
  ps [HOST]         processes of that host (all: every host), without init and sshd
  check             can this machine do it?  exit 0 yes, 77 no (and why)
environment: HOSTS_STATE=$STATE HOSTS_SUBNET=$SUBNET HOSTS_PREFIX=$PREFIX
  HOSTS_SHARE=dir:dir (seen by all hosts though under ${PRIVATE[*]})
  HOSTS_KNOWN=N  every host knows the cards of hosts 1..N for good. All hosts share the kernel's table of
                 neighbours, which has room for 1,024 that are learned: where 33 hosts or more all speak to
                 each other, it is full. But a host that is off is then silent, where it had no route.
  HOSTS_MODE=auto|root|user  HOSTS_HOSTSFILE=good|debian|none  HOSTS_WAIT=$HOSTS_WAIT
EOF
}

say()  { printf '%s\n' "hosts.sh: $*" >&2; }
die()  { say "$*"; exit 1; }
skip() { say "cannot build the hosts on this machine: $*"; exit 77; }

# ---------------------------------------------------------------- what can be done here
SSHD=$(command -v sshd || true)
UIDMAP=$(id -u); GIDMAP=$(id -g)

probe_root() {  # namespaces, a bridge and a veth pair, all thrown away at once
  unshare --net --mount --uts --ipc --pid --fork sh -c '
    mount -t tmpfs tmpfs /mnt && mount -t proc proc /proc &&
    ip link add br0 type bridge && ip link add vx1 type veth peer name vx2' 2>&1
}
probe_user() {
  unshare --user --map-root-user --net --mount --uts --ipc --pid --fork sh -c '
    mount -t tmpfs tmpfs /mnt && mount -t proc proc /proc &&
    ip link add br0 type bridge && ip link add vx1 type veth peer name vx2' 2>&1
}
need_tools() {
  local t miss=()
  for t in ip unshare nsenter flock ssh ssh-keygen mount setsid; do
    command -v "$t" >/dev/null || miss+=("$t"); done
  [ -n "$SSHD" ] || miss+=(sshd)
  [ ${#miss[@]} = 0 ] || skip "missing: ${miss[*]} (Debian: apt-get install iproute2 util-linux openssh-server openssh-client)"
}
pick_mode() {  # sets MODE to root or user, or skips with the reason
  local r u
  need_tools
  case $MODE in
    root|auto)
      if [ "$(id -u)" = 0 ] && r=$(probe_root); then MODE=root; return; fi
      [ "$(id -u)" = 0 ] || r="not root"
      [ "$MODE" = root ] && skip "root mode: $r (needs root with CAP_SYS_ADMIN and CAP_NET_ADMIN; in docker: --privileged)";;
    user) r="not tried";;
    *) die "HOSTS_MODE is '$MODE': auto, root or user";;
  esac
  if u=$(probe_user); then MODE=user; return; fi
  skip "as root: $r; as an unprivileged user namespace: ${u//$'\n'/; } (see sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, kernel.apparmor_restrict_unprivileged_userns; in docker: --security-opt seccomp=unconfined)"
}

# ---------------------------------------------------------------- state
starttime() { # empty for a process that is dead or a zombie
  local s; s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1; s=${s##*) }; set -- $s
  case $1 in Z|X) return 1;; esac; echo "${20}"; }
alive() {   # alive FILE: prints the pid when the process recorded there is still that process
  local p t
  [ -s "$1" ] && read -r p t <"$1" || return 1
  [ -n "$t" ] && [ "$(starttime "$p")" = "$t" ] && echo "$p"
}
record() { echo "$1 $(starttime "$1")" >"$2"; }
node_names() { local f; for f in "$STATE"/node-*; do [ -d "$f" ] && basename "$f" | sed 's/^node-//'; done | sort -V; }
load() {    # the lab's own settings win over the environment
  [ -s "$STATE/conf" ] || return 1
  . "$STATE/conf"
}
lock() { mkdir -p "$STATE" || die "cannot make $STATE"; exec 9>"$STATE/lock"; flock -w 120 9 || die "another hosts.sh works on $STATE"; }
need_lab() { load || die "no lab in $STATE (start one: $ME up 2)"; }
hub_pid() { alive "$STATE/hub.pid"; }
pid_of() { alive "$STATE/node-$1/pid"; }

in_hub() {  # run a command in the hub's network namespace (all privileges over it)
  local p; p=$(hub_pid) || die "the hub of $STATE is not up"
  if [ "$MODE" = user ]; then nsenter -t "$p" --user --net --preserve-credentials -- "$@" 9>&-
  else nsenter -t "$p" --net -- "$@" 9>&-; fi
}
in_node_admin() { # in_node_admin HOST CMD...: with the privileges that built the host
  local p n=$1; shift; p=$(pid_of "$n") || die "$n is not up"
  if [ "$MODE" = user ]; then nsenter -t "$p" --user --mount --uts --ipc --net --pid --preserve-credentials -- "$@" 9>&-
  else nsenter -t "$p" --mount --uts --ipc --net --pid -- "$@" 9>&-; fi
}

# ---------------------------------------------------------------- inside a new host: PID 1
__init() {  # runs in the fresh namespaces; args: NAME
  local name=$1 d m i s rest=() p q
  d=$STATE/node-$name; m=$d/m
  cd -P /proc/self && echo "${PWD##*/}" >"$d/hostpid"; cd /     # our pid as the machine sees it
  set -e
  hostname "$name" 2>/dev/null || echo "$name" >/proc/sys/kernel/hostname
  mkdir -p "$m"; mount -t tmpfs -o mode=755 tmpfs "$m"
  mkdir -p "$m/etc"; cp -a /etc/. "$m/etc/" 2>/dev/null || true
  # private folders: an empty tmpfs each, the shared folders bound back into them
  for p in "${PRIVATE[@]}"; do
    [ -d "$p" ] || continue
    q=$m/p${p//\//_}; mkdir -p "$q"; mount -t tmpfs -o mode=1777 tmpfs "$q"
    IFS=: read -ra rest <<<"$STATE:$(dirname "$ME"):$SHARE"
    for s in "${rest[@]}"; do
      [ -n "$s" ] && [ -d "$s" ] || continue
      case $s in "$p"/*) i=$q${s#"$p"}; mkdir -p "$i"; mountpoint -q "$i" || mount --rbind "$s" "$i";; esac
    done
  done
  mkdir -p "$m/p_run/sshd" "$m/p_run/home/.ssh" "$m/p_run/lock"; chmod 755 "$m/p_run" "$m/p_run/sshd"; chmod 700 "$m/p_run/home/.ssh"
  cp "$STATE/keys/id_ed25519" "$STATE/keys/id_ed25519.pub" "$m/p_run/home/.ssh/"; chmod 600 "$m/p_run/home/.ssh/id_ed25519"
  # /etc: own names, own ssh keys, the user's home in /run/home
  rm -f "$m/etc/hostname" "$m/etc/hosts" "$m/etc/resolv.conf" "$m/etc/nologin"
  echo "$name" >"$m/etc/hostname"; : >"$m/etc/resolv.conf"
  cp "$STATE/hosts.$name" "$m/etc/hosts"
  { echo "$HUSER:x:$HUID:$HGID:lab:/run/home:/bin/bash"
    grep -v -e "^$HUSER:" -e "^[^:]*:[^:]*:$HUID:" /etc/passwd || true
    grep -q '^sshd:' /etc/passwd || echo "sshd:x:65530:65534::/run/sshd:/usr/sbin/nologin"; } >"$m/etc/passwd"
  if [ "$MODE" = user ]; then
    { echo "lab:x:$HGID:"; grep -v "^[^:]*:[^:]*:$HGID:" /etc/group || true; } >"$m/etc/group"; fi
  rm -rf "$m/etc/ssh"; mkdir -p "$m/etc/ssh"
  cp "$STATE/keys/host_$name" "$m/etc/ssh/ssh_host_ed25519_key"; chmod 600 "$m/etc/ssh/ssh_host_ed25519_key"
  cp "$STATE/keys/id_ed25519.pub" "$m/etc/ssh/authorized_keys"; cp "$STATE/known_hosts" "$m/etc/ssh/ssh_known_hosts"
  cat >"$m/etc/ssh/sshd_config" <<EOF
Port 22
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
AllowUsers $HUSER
UsePAM no
UseDNS no
StrictModes no
PrintMotd no
PrintLastLog no
PidFile none
MaxStartups 200
MaxSessions 200
AllowAgentForwarding no
X11Forwarding no
Subsystem sftp internal-sftp
EOF
  : >"$m/etc/ssh/ssh_config"
  # now turn the folders round, then /proc and /sys of this host
  # (the one that holds $STATE, and so $m, must be the last to turn)
  mount --rbind "$m/etc" /etc
  i=
  for p in "${PRIVATE[@]}"; do
    [ -d "$p" ] || continue
    case $STATE in "$p"/*) i=$p; continue;; esac
    mount --rbind "$m/p${p//\//_}" "$p"
  done
  [ -z "$i" ] || mount --rbind "$m/p${i//\//_}" "$i"
  mount -t proc proc /proc
  mount -t sysfs sysfs /sys 2>/dev/null || true
  # network: the hub moves eth0 in; wait for it
  ip link set lo up
  for i in $(seq 1 300); do ip link show eth0 >/dev/null 2>&1 && break; sleep 0.05; done
  ip addr add "$HADDR/24" dev eth0; ip link set eth0 up
  for i in $(seq 1 "$KNOWN"); do [ "$SUBNET.$i" = "$HADDR" ] ||
    echo "neigh replace $SUBNET.$i lladdr $(card "$i") dev eth0 nud permanent"; done | ip -batch -
  [ "$MODE" = user ] && echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start
  set +e
  __sshd_start
  echo ready >"$d/ready"
  # PID 1: reap whatever is left to us, for ever
  trap 'exit 0' TERM INT
  trap : CHLD HUP PIPE
  while :; do sleep 3600 & wait $!; done
}
__sshd_start() {
  local e=(env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/run/home LANG="${LANG:-C.UTF-8}")
  if [ "$MODE" = user ]; then   # a plain user sshd: needs no setuid, no chroot
    "${e[@]}" setsid unshare --user --map-user="$HUID" --map-group="$HGID" "$SSHD" -D -e -f /etc/ssh/sshd_config >>/run/sshd.log 2>&1 </dev/null &
  else "${e[@]}" setsid "$SSHD" -D -e -f /etc/ssh/sshd_config >>/run/sshd.log 2>&1 </dev/null & fi
  echo $! >/run/sshd.pid
}

# ---------------------------------------------------------------- up
write_names() { # the names and host keys of hosts 1..max, pushed to the hosts that run
  local n k; local -a all; mapfile -t all < <(node_names)
  : >"$STATE/known_hosts"
  for n in "${all[@]}"; do k=${n#"$PREFIX"}
    echo "$n,$SUBNET.$k $(cut -d' ' -f1,2 <"$STATE/keys/host_$n.pub")" >>"$STATE/known_hosts"
    echo "localhost,127.0.0.1 $(cut -d' ' -f1,2 <"$STATE/keys/host_$n.pub")" >>"$STATE/known_hosts"; done
  local me
  for me in "${all[@]}"; do
    { echo "127.0.0.1 localhost"; echo "::1 localhost ip6-localhost"
      [ "$HOSTSFILE" = debian ] && echo "127.0.1.1 $me"
      [ "$HOSTSFILE" = none ] || for n in "${all[@]}"; do k=${n#"$PREFIX"}
        [ "$HOSTSFILE" = debian ] && [ "$n" = "$me" ] || echo "$SUBNET.$k $n"; done
    } >"$STATE/hosts.$me"
    if pid_of "$me" >/dev/null; then
      in_node_admin "$me" sh -c "cat '$STATE/hosts.$me' >/etc/hosts; cat '$STATE/known_hosts' >/etc/ssh/ssh_known_hosts"; fi
  done
}
start_hub() {
  local p i
  hub_pid >/dev/null && return
  rm -f "$STATE/hub.host"
  local ns=(--net); [ "$MODE" = user ] && ns=(--user --map-root-user --net)
  setsid unshare "${ns[@]}" bash "$ME" __hub "$STATE" >>"$STATE/hub.log" 2>&1 </dev/null 9>&- &
  for i in $(seq 1 200); do [ -s "$STATE/hub.host" ] && break; sleep 0.05; done
  p=$(cat "$STATE/hub.host" 2>/dev/null) || die "the hub did not start: $(tail -3 "$STATE/hub.log")"
  record "$p" "$STATE/hub.pid"
  in_hub sh -c "ip link set lo up; ip link add br0 type bridge stp_state 0 forward_delay 0 && ip addr add $SUBNET.254/24 dev br0 && ip link set br0 up" || die "the bridge could not be made"
}
__hub() { echo $$ >"$STATE/hub.host"; trap 'exit 0' TERM INT; while :; do sleep 3600 & wait $!; done; }

card() { printf '02:00:0a:4d:%02x:%02x' $(($1 / 256)) $(($1 % 256)); }
start_node() { # start_node K
  local k=$1 n=$PREFIX$1 d p i mac
  d=$STATE/node-$n
  if pid_of "$n" >/dev/null; then return 0; fi
  rm -f "$d/pid" "$d/hostpid" "$d/ready"
  in_hub ip link del "v$k" 2>/dev/null
  local ns=(--mount --uts --ipc --net --pid --fork --kill-child --propagation private) pre=()
  [ "$MODE" = user ] && pre=(nsenter -t "$(hub_pid)" --user --preserve-credentials --)
  HADDR=$SUBNET.$k setsid "${pre[@]}" unshare "${ns[@]}" bash "$ME" __init "$STATE" "$n" >>"$d/log" 2>&1 </dev/null 9>&- &
  for i in $(seq 1 $((HOSTS_WAIT * 20))); do [ -s "$d/hostpid" ] && break; sleep 0.05; done
  p=$(cat "$d/hostpid" 2>/dev/null) || die "$n did not start: $(tail -3 "$d/log")"
  record "$p" "$d/pid"
  # a card keeps its address through a reboot: the others still know it
  mac=$(card "$k")
  in_hub sh -c "ip link add v$k type veth peer name eth0 address $mac netns $p && ip link set v$k master br0 up" || die "$n: the cable could not be laid"
}
cmd_up() {
  local N=${1:-2} k n i ok
  [[ $N =~ ^[0-9]+$ ]] && [ "$N" -ge 1 ] && [ "$N" -le 200 ] || die "up N: N is 1..200, not '$N'"
  lock
  if load && hub_pid >/dev/null; then :   # a lab is there: repair or add, in its own mode
  else
    pick_mode
    if [ "$MODE" = user ]; then HUSER=lab; HUID=1000; HGID=1000; else HUSER=$(id -un); HUID=0; HGID=0; fi
    rm -rf "$STATE"/node-* "$STATE"/*.pid "$STATE"/*.host "$STATE"/hosts.*
    mkdir -p "$STATE/keys"; chmod 700 "$STATE/keys"
    printf '%s\n' "MODE=$MODE" "SUBNET=$SUBNET" "PREFIX=$PREFIX" "KNOWN=$KNOWN" "SHARE=${SHARE@Q}" "HUSER=$HUSER" "HUID=$HUID" "HGID=$HGID" "HOSTSFILE=$HOSTSFILE" >"$STATE/conf"
  fi
  need_tools
  [ -s "$STATE/keys/id_ed25519" ] || ssh-keygen -q -t ed25519 -N '' -C hosts-lab -f "$STATE/keys/id_ed25519"
  for k in $(seq 1 "$N"); do n=$PREFIX$k; mkdir -p "$STATE/node-$n"
    [ -s "$STATE/keys/host_$n" ] || ssh-keygen -q -t ed25519 -N '' -C "$n" -f "$STATE/keys/host_$n"; done
  start_hub
  write_names
  for k in $(seq 1 "$N"); do start_node "$k"; done
  # every host must be reachable by ssh from the hub, as a launcher would
  for k in $(seq 1 "$N"); do n=$PREFIX$k; ok=
    for i in $(seq 1 $((HOSTS_WAIT * 5))); do reach "$n" && { ok=1; break; }; pid_of "$n" >/dev/null || break; sleep 0.2; done
    [ "$ok" ] || die "$n does not answer ssh: $(tail -2 "$STATE/node-$n/log" 2>/dev/null) $(in_node_admin "$n" tail -2 /run/sshd.log 2>/dev/null)"
    say "$n up ($SUBNET.$k, $MODE mode)"
  done
}
reach() { # from the hub: does this host answer ssh?
  local cmd=(ssh -F none -i "$STATE/keys/id_ed25519" -o BatchMode=yes -o ConnectTimeout=2 -o UserKnownHostsFile="$STATE/known_hosts" -o IdentitiesOnly=yes "$HUSER@$SUBNET.${1#"$PREFIX"}" true)
  [ "$(timeout 5 true; in_hub "${cmd[@]}" >/dev/null 2>&1 </dev/null; echo $?)" = 0 ]
}

# ---------------------------------------------------------------- the rest
strays() { # processes of this lab whose state file is gone (the state folder is their last word)
  local p a
  for p in /proc/[0-9]*; do
    mapfile -d '' -t a 2>/dev/null <"$p/cmdline" || continue
    local i; for i in "${!a[@]}"; do
      if [ "${a[i]}" = "$ME" ] && { [ "${a[i+1]:-}" = __init ] || [ "${a[i+1]:-}" = __hub ]; } && [ "${a[i+2]:-}" = "$STATE" ]; then echo "${p#/proc/}"; fi
    done
  done 2>/dev/null
}
cmd_down() {
  local n p i left
  [ -d "$STATE" ] || { [ -z "$(strays)" ] && return 0; }
  lock; load
  for n in $(node_names); do p=$(pid_of "$n") && kill -9 "$p"; done
  p=$(hub_pid) && kill -9 "$p"
  for i in $(seq 1 100); do
    left=$(strays); [ -z "$left" ] && break
    [ "$i" = 20 ] && kill -9 $left 2>/dev/null
    sleep 0.1
  done
  [ -z "$left" ] || die "still there after 10 s: pids $left"
  rm -rf "$STATE"/node-* "$STATE"/hub.* "$STATE"/hosts.* "$STATE/conf" "$STATE/known_hosts" "$STATE/keys"
  rm -f "$STATE/lock"; rmdir "$STATE" 2>/dev/null
  say "down"
}
power_off() { # kills PID 1 of the host, and so all of it; returns when nothing of it is left
  local i; kill -9 "$2"
  for i in $(seq 1 300); do [ -e "/proc/$2" ] || break; sleep 0.05; done
  rm -f "$STATE/node-$1/pid"
}
cmd_status() {
  local n rc=0 s
  need_lab; hub_pid >/dev/null || { say "hub is not up"; return 1; }
  for n in $(node_names); do
    if ! pid_of "$n" >/dev/null; then s="off"; rc=1; elif reach "$n"; then s="up, pid $(pid_of "$n")"; else s="up, but does not answer ssh"; rc=1; fi
    echo "$n $SUBNET.${n#"$PREFIX"} $MODE $s"
  done
  return $rc
}
run_as() {  # a shell line that goes to the caller's folder (or HOME) and runs its arguments
  printf '%s' 'cd "$HOSTS_CWD" 2>/dev/null || cd; unset HOSTS_CWD; exec "$@"'
}
cmd_exec() {
  local n=$1 p; shift; [ $# -gt 0 ] || die "exec HOST CMD..."
  need_lab
  if [ "$n" = hub ]; then
    p=$(hub_pid) || die "the hub of $STATE is not up"
    if [ "$MODE" = user ]; then exec nsenter -t "$p" --user --net --preserve-credentials -- "$@"; else exec nsenter -t "$p" --net -- "$@"; fi
  fi
  p=$(pid_of "$n") || die "$n is not up"
  export HOSTS_CWD=$PWD HOME=/run/home USER=$HUSER LOGNAME=$HUSER
  if [ "$MODE" = user ]; then
    exec nsenter -t "$p" --user --mount --uts --ipc --net --pid --preserve-credentials -- \
      unshare --user --map-user="$HUID" --map-group="$HGID" bash -c "$(run_as)" "$n" "$@"
  else exec nsenter -t "$p" --mount --uts --ipc --net --pid -- bash -c "$(run_as)" "$n" "$@"; fi
}
port() { [ -d "$STATE/node-$1" ] || die "no host '$1' (have: $(node_names | tr '\n' ' '))"; echo "v${1#"$PREFIX"}"; }
cmd_ps() {
  local n; need_lab
  for n in ${1:-$(node_names)}; do
    pid_of "$n" >/dev/null || { echo "$n off"; continue; }
    in_node_admin "$n" ps -eo pid,ppid,stat,etimes,args --no-headers -ww 2>/dev/null | awk -v n="$n" '
      $1==1 || /[0-9] (sshd: |\/usr\/sbin\/sshd|sleep 3600|ps -eo|unshare --user)/ {next} {print n, $0}'
  done
}
main() {
  local c=${1:-}; [ $# -gt 0 ] && shift
  case $c in
    up) cmd_up "$@";; down) cmd_down;; status) cmd_status;; exec) cmd_exec "$@";;
    shell) cmd_exec "$1" bash -i;;
    check) pick_mode; say "can build hosts, $MODE mode";;
    ps) cmd_ps "$@";;
    link) need_lab; v=$(port "$1") || exit 1; in_hub ip link set "$v" "${2:?down|up}";;
    cut) need_lab; v=$(port "$1") || exit 1
         case ${2:-} in on) in_hub bridge link set dev "$v" state 0;; off) in_hub bridge link set dev "$v" state 3;; *) die "cut HOST on|off";; esac;;
    tc) need_lab; v=$(port "$1") || exit 1; shift
        if [ "${1:-}" = off ]; then in_hub tc qdisc del dev "$v" root; else in_hub tc qdisc replace dev "$v" root "$@"; fi;;
    sshd) need_lab; case ${2:-} in
        stop) in_node_admin "$1" sh -c 'kill $(cat /run/sshd.pid)';;
        start) in_node_admin "$1" env MODE="$MODE" bash "$ME" __sshd "$STATE";; *) die "sshd HOST stop|start";; esac;;
    power) need_lab; lock; p=$(pid_of "$1") || die "$1 is not up"
         case ${2:-} in off) in_hub ip link set "v${1#"$PREFIX"}" nomaster;; halt) ;; *) die "power HOST off|halt";; esac
         power_off "$1" "$p";;
    __init) STATE=$1; load; __init "$2";;
    __hub) STATE=$1; load; __hub;;
    __sshd) STATE=$1; load; __sshd_start;;
    -h|--help|help) usage;;
    *) usage >&2; exit 2;;
  esac
}
main "$@"; exit
