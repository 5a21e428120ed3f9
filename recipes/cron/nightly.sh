#!/bin/sh
# One start of a run that is repeated by cron:   nightly.sh FOLDER LONGBATCH
#
# FOLDER holds manifest.jsonl and, for settings, longbatch.toml; results go to FOLDER/out, one plain log of each start to
# FOLDER/starts, kept for 30 days. LONGBATCH is the program's full path: cron knows nothing of a virtual environment.
# Prints nothing when all is well, so that cron sends mail only when something is not.
folder=${1:?which folder}
longbatch=${2:?which longbatch}
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin}
export PATH
umask 077
cd "$folder" || exit 2
mkdir -p starts
log=starts/$(date +%Y%m%d-%H%M%S)-$$.log

"$longbatch" run manifest.jsonl -o out --skip-if-running --progress log >"$log" 2>&1
code=$?

find starts -name '*.log' -mtime +30 -exec rm -f {} +
# 75: its time was over, the next start goes on.
if [ "$code" -ne 0 ] && [ "$code" -ne 75 ]; then
  echo "longbatch ended with $code; $folder/$log ends with:"
  tail -n 5 "$log"
fi
exit "$code"
