#!/usr/bin/env bash
# Test the Dockerfile without Docker, as root on a Debian with debootstrap and 10 GB in $TMPDIR:
#
#     benchmarks/container.sh
#
# This runs its steps in a new root directory, and prints the time and space of each. Then the user
# of the image trains there without network, once directly and once as a job on a Ray head. The hook
# of kube/rayjob.yaml stops this job; submitting it again resumes it. pip is set up as on this machine.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ $# = 0 ]; then # mounts and processes end with the inner call; only then is the folder removed
    outer=$(mktemp -d "${TMPDIR:-/var/tmp}/container.XXXXXX")
    trap 'rm -rf --one-file-system "$outer"' EXIT
    unshare --mount --pid --fork --kill-child "$0" "$outer"
    exit
fi
log=$1/log root=$1/root size=0 user=0:0 workdir=/ network=()
env=(PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin)
mapfile -t pip < <(env | grep '^PIP_[A-Z_]*=')

inside() { # COMMAND...: run it as docker run does, with the user, folder and variables of the image
    local home
    home=$(awk -F: -v id="${user%:*}" '$3 == id { print $6 }' "$root/etc/passwd")
    "${network[@]}" chroot --userspec="$user" "$root" env -i "${env[@]}" "${pip[@]}" HOME="$home" \
        sh -c 'cd "$0" && exec "$@"' "$workdir" "$@"
}

bootstrap() { # RELEASE
    debootstrap --variant=minbase "$1" "$root"
    cp /etc/resolv.conf "$root/etc"
    mount -t proc proc "$root/proc"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/run"
    [ -z "${PIP_CERT:-}" ] || { cp "$PIP_CERT" "$root/run/pip.pem" && pip+=(PIP_CERT=/run/pip.pem); }
}

copy() { # [--chown=USER:GROUP] SOURCE TARGET; git reads .dockerignore as Docker does
    local owner=0:0
    [[ $1 != --chown=* ]] || { owner=${1#*=} && shift; }
    GIT_INDEX_FILE=/nonexistent git ls-files -z --others --exclude-from=.dockerignore -- "$1" |
        tar -c --null -T - --owner="+${owner%:*}" --group="+${owner#*:}" |
        tar -x -C "$root/$(realpath -ms --relative-to=/ "$workdir/$2")"
}

step() { # TITLE COMMAND...
    local title=$1 began=$SECONDS before=$size
    shift
    "$@" >"$log" 2>&1 </dev/null || { tail -n 40 "$log" && echo "FAILED: $title" && exit 1; }
    size=$(du -smx "$root" | cut -f1)
    printf '%4d s %6d MB  %.90s\n' $((SECONDS - began)) $((size - before)) "$title"
}

while read -r -u 3 word rest; do
    read -r -a words <<<"$rest"
    case $word in
    FROM) step "$word $rest" bootstrap "$(sed 's/^debian:\([a-z]*\).*/\1/' <<<"$rest")" ;;
    RUN) step "$word $rest" inside sh -c "$rest" ;;
    COPY) step "$word $rest" copy "${words[@]}" ;;
    ENV) env+=("${words[@]}") ;;
    WORKDIR) workdir=$rest && mkdir -p "$root$rest" ;;
    USER) user=$rest ;;
    CMD) ;;
    *) echo "cannot $word" && exit 1 ;;
    esac
done 3< <(sed -e '/^#/d' -e :a -e '/\\$/{N;s/ *\\\n */ /;ba}' Dockerfile)
printf '%4d s %6d MB  in all, with %s\n' $SECONDS "$size" "$(inside python --version)"

hook=$(sed -n '/pkill/,/pgrep/p' kube/rayjob.yaml)
cat >"$root/run/train.sh" <<'END'
set -eu
train() { # COMMAND...: run it with the flags of a short run
    "$@" --target-prompt "a humanoid robot kneeling" --clip-model local-dir:tiny_clip \
        --render-size 64 --num-envs 2 --episode-length 10 --learning-starts 0 --gradient-steps 2
}
train python sac_clip_humanoid.py --total-timesteps 20 --runs-dir /data/once
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=00000000000000000000000000000000 # as KubeRay sets them
bash -lc "ray start --head --num-cpus=1 --disable-usage-stats" # as KubeRay calls it
submit() { # ID: start the job and wait for its first rollout
    train ray job submit --no-wait --submission-id "$1" -- python /app/sac_clip_humanoid.py \
        --reward-devices ray:1 --resume latest --runs-dir /data/runs
    timeout 100 sh -c 'until ray job logs "$0" | grep "^step"; do sleep 1; done' "$1"
}
submit one
sh -c "$1"
timeout 10 sh -c 'until ray job status one | grep "exit code 143"; do sleep 1; done'
submit two
find /data -name "*.pt" -o -name "*.mp4" -o -name "events*"
END
network=(unshare --net sh -c 'ip link set lo up && exec "$@"' sh)
step "trained, stopped, resumed as $(inside id -un)" inside sh /run/train.sh "$hook"
grep -E '^step|exit code|^/data' "$log"
