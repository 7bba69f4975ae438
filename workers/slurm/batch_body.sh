# What follows is the same at every site.

say() { printf '%s layout-tuner: %s\n' "$(date '+%F %T')" "$*" >&2; }
give_up() {
  say "$*"
  exit 1
}

umask 077
# Of the shell that this was submitted from: other clusters, and filters and orders for Slurm's programs.
unset SLURM_CLUSTERS SLURM_HOSTFILE SLURM_DISTRIBUTION "${!SQUEUE_@}" "${!SCANCEL_@}"
if ! mapfile -t node_names < <(scontrol show hostnames "$SLURM_JOB_NODELIST") || [ "${#node_names[@]}" = 0 ]; then
  give_up "the job's nodes are not known: this script is for sbatch"
fi
job_dir="$node_local_dir/layout-tuner-$SLURM_JOB_ID"
one_a_node=(--nodes="${#node_names[@]}" --ntasks="${#node_names[@]}" --ntasks-per-node=1
  --cpus-per-task="${cores_per_node:-$SLURM_CPUS_ON_NODE}" --mem=0 --overlap "${step_options[@]}")
# After `sbatch --export=NONE` steps would have neither the token nor what the site sets.
export SLURM_EXPORT_ENV=ALL
ray_step=
worker=
mkdir -p -m 700 "$job_dir" || give_up "no directory can be made in $node_local_dir"

# Another user may have put something under this name into a directory that is for all. Whether $1 is a directory
# (no link to one), this user's, and closed to others: looked at once, so that it can't change between two looks.
is_private() {
  [ -n "$(find "$1" -maxdepth 0 -type d -uid "$UID" ! -perm /077)" ]
}
is_private "$job_dir" || give_up "$job_dir is another user's, or others can use it: remove it"

# Waits up to $2 seconds for process $1 to end.
has_ended() {
  local deadline=$((SECONDS + $2))
  while kill -0 "$1" 2>/dev/null; do
    [ "$SECONDS" -lt "$deadline" ] || return 1
    sleep 0.2
  done
}

# Slurm hands SIGTERM to Ray's tasks, which end what they started. A SIGTERM to srun would kill them at once.
end_ray() {
  local step deadline=$((SECONDS + 20))
  while kill -0 "$ray_step" 2>/dev/null && [ "$SECONDS" -lt "$deadline" ]; do
    step=$(squeue --steps --noheader --jobs "$SLURM_JOB_ID" --format '%i %j' | awk '$2 == "layout-tuner-ray" { print $1 }')
    [ -z "$step" ] || scancel --signal=TERM "$step"
    has_ended "$ray_step" 4 && return # one that was just starting had not heard
  done
  kill -TERM "$ray_step" 2>/dev/null
  has_ended "$ray_step" 20 || kill -KILL "$ray_step" 2>/dev/null
}

# However the script ends: the steps end, and the directories go.
clean_up() {
  local code=$?
  trap '' TERM INT
  if [ -n "$worker" ] && kill -TERM "$worker" 2>/dev/null; then
    has_ended "$worker" 30 || kill -KILL "$worker"
  fi
  if [ -n "$ray_step" ] && kill -0 "$ray_step" 2>/dev/null; then
    end_ray
  fi
  if [ -n "$archive" ]; then
    timeout 30 srun "${one_a_node[@]}" rm -rf "$job_dir"
  fi
  rm -rf "$job_dir"
  exit "$code"
}
trap clean_up EXIT

# Puts the packed environment on every node's own disk: importing torch from a shared one takes minutes.
unpack_environment() {
  say "unpacking $archive on ${#node_names[@]} nodes"
  export -f is_private
  # shellcheck disable=SC2016 # the nodes expand it
  srun "${one_a_node[@]}" bash -c 'mkdir -p -m 700 "$1" && is_private "$1" && mkdir -p "$1/environment"' make "$job_dir" \
    || give_up "a node has no $node_local_dir, or a $job_dir of another user's or that others can use"
  sbcast --force "$archive" "$job_dir/environment.tar" || give_up "$archive can't be copied to the nodes"
  # shellcheck disable=SC2016 # the nodes expand it
  srun "${one_a_node[@]}" bash -c '
    cd "$1/environment" && tar -xf ../environment.tar || exit 1
    if [ -x bin/conda-unpack ]; then bin/python bin/conda-unpack; fi
    [ -x bin/python ]' unpack "$job_dir" || give_up "$archive has no bin/python, or no room on a node"
  # Not by each of the tasks: where nodes share the directory, others may not have read it yet.
  srun "${one_a_node[@]}" rm -f "$job_dir/environment.tar"
  python="$job_dir/environment/bin/python"
  export PATH="$job_dir/environment/bin:$PATH"
}

# Where others reach the node of name $1 and position $2: Ray knows nodes by numbers, not by names.
address_of() {
  local address=${node_address//'{name}'/$1} found
  address=${address//'{index}'/$2}
  found=$(getent ahostsv4 "$address") || give_up "$address (a node, by the site's node_address) has no address"
  printf '%s' "${found%% *}"
}

# One step, one task a node: each brings up Ray there, and again when it breaks.
start_ray() {
  local head
  head="$(address_of "${node_names[0]}" 0)" || exit 1
  head+=":$((20000 + SLURM_JOB_ID % 10000))"
  RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
  export -f say give_up address_of
  # shellcheck disable=SC2016 # the nodes expand it
  node_address="$node_address" srun "${one_a_node[@]}" --job-name=layout-tuner-ray --no-kill --wait=0 bash -c '
    address=$(address_of "$SLURMD_NODENAME" "$SLURM_NODEID") || exit 1
    exec "$1" -P -m layout_tuner.workers.ray_node --head "$2" --address "$address"' ray-node "$python" "$head" &
  ray_step=$!
  worker_options+=(--ray-address "$head")
}

# On SIGTERM (sent before the wall time is over, or by `allocation cancel`) the worker returns its trials
# and ends. A trap ends `wait` before the worker does: then it is waited for again.
run_worker() {
  env "${worker_environment[@]}" "$python" -P -m layout_tuner worker --cluster "$cluster" --launcher "$launcher" \
    --url "$url" --token-file "$token_file" --name "$worker_name-$SLURM_JOB_ID" "${worker_options[@]}" &
  worker=$!
  local code told
  trap 'told=1; kill -TERM "$worker" 2>/dev/null' TERM INT
  while :; do
    told=
    wait "$worker"
    code=$?
    [ -n "$told" ] || break
  done
  worker=
  return "$code"
}

site_environment
[ -z "$archive" ] || unpack_environment
[ -x "$python" ] || give_up "there is no $python on ${node_names[0]}"
if [ -n "$cluster_document" ]; then
  cluster="$job_dir/cluster.json"
  printf '%s\n' "$cluster_document" >"$cluster" || give_up "$job_dir can't be written to"
fi
unset RAY_ADDRESS
say "$launcher on ${#node_names[@]} nodes: ${node_names[*]}"
[ "$launcher" != ray ] || start_ray
run_worker
