{{/*
A worker over several nodes: TensorRT-LLM's ranks, which mpirun starts over SSH, as root. The leader of a group serves the
worker, and has the labels of the Service; a group whose pod restarts is made anew as a whole.
*/}}
{{- define "trtmesh.nodes" -}}
{{- $pool := .pool -}}
{{- $gpus := int ($pool.gpus | default 0) -}}
{{- $parallel := dig "tensorrt_llm" "parallel" dict ($pool.settings | default dict) -}}
{{- $ranks := mul (get $parallel "tensor" | default 1) (get $parallel "pipeline" | default 1) -}}
{{- if ne ($pool.backend | default "torch") "tensorrt_llm" }}{{ fail (printf "pools: %s has nodes, which the backend tensorrt_llm alone can use" $pool.name) }}{{ end -}}
{{- if ne (int $ranks) (mul $gpus $pool.nodes.size | int) }}{{ fail (printf "pools: %s has %d gpus on each of %d nodes, but tensor x pipeline of settings.tensorrt_llm.parallel is %d" $pool.name $gpus (int $pool.nodes.size) (int $ranks)) }}{{ end -}}
{{- $rankLabels := printf "%s\napp.kubernetes.io/component: engine-ranks\ntrtmesh/pool: %q" (include "trtmesh.podLabels" .root) $pool.name -}}
apiVersion: leaderworkerset.x-k8s.io/v1
kind: LeaderWorkerSet
metadata:
  name: {{ .name }}
  labels:
    {{- .labels | nindent 4 }}
spec:
  {{- if not $pool.autoscaling }}
  replicas: {{ include "trtmesh.number" (dict "of" $pool "key" "replicas" "default" 1) }}
  {{- end }}
  startupPolicy: LeaderCreated
  rolloutStrategy:
    type: RollingUpdate
    rollingUpdateConfiguration: {{ $pool.strategy | default (dict "maxSurge" 0 "maxUnavailable" 1) | toJson }}
  leaderWorkerTemplate:
    size: {{ $pool.nodes.size }}
    restartPolicy: RecreateGroupOnPodRestart
    leaderTemplate:
      metadata:
        labels:
          {{- .podLabels | nindent 10 }}
        annotations:
          checksum/config: {{ include "trtmesh.config" .config | sha256sum }}
          {{- with $pool.podAnnotations }}
          {{- toYaml . | nindent 10 }}
          {{- end }}
      spec:
        {{- include "trtmesh.nodes.pod" . | nindent 8 }}
        containers:
          - name: engine
            image: {{ include "trtmesh.engine.image" (dict "root" .root "pool" $pool) | quote }}
            imagePullPolicy: {{ .root.Values.image.pullPolicy }}
            command: [bash, -c]
            args:
              - |
                set -euo pipefail
                install -d -m 700 ~/.ssh && install -m 600 /ssh/* ~/.ssh/
                printf 'Port 2222\nStrictHostKeyChecking accept-new\nConnectionAttempts 60\n' > ~/.ssh/config
                # The worker with index N of the leader NAME.DOMAIN is NAME-N.DOMAIN.
                hosts=$LWS_LEADER_ADDRESS:{{ $gpus }}
                for ((index = 1; index < LWS_GROUP_SIZE; index++)); do
                  hosts+=,${LWS_LEADER_ADDRESS/./-$index.}:{{ $gpus }}
                done
                exec mpirun --allow-run-as-root -x PATH -x PYTHONPATH -x LD_LIBRARY_PATH -np $((LWS_GROUP_SIZE * {{ $gpus }})) --host "$hosts" \
                  trtllm-llmapi-launch python3 -m trtmesh.engine \
                  {{ join " \\\n" .args | nindent 18 | trim }}
            {{- with include "trtmesh.env" (dict "root" .root "of" $pool) }}{{ trim . | nindent 12 }}{{ end }}
            # mpirun would kill the ranks soon after SIGTERM. So the engine is told first: it drains, and mpirun ends with it.
            lifecycle:
              preStop:
                exec:
                  command:
                    - bash
                    - -c
                    - |
                      for process in /proc/[0-9]*; do
                        [[ $(tr '\0' ' ' < "$process/cmdline") == "python3 -m trtmesh.engine "* ]] || continue
                        kill -TERM "${process#/proc/}"
                        while [[ -d $process ]]; do sleep 0.2; done
                      done
            ports:
              - {name: grpc, containerPort: 9101}
              - {name: metrics, containerPort: 8002}
            {{- include "trtmesh.probes" (dict "root" .root "port" 9101 "startupSeconds" .start "starts" "" "ready" "") | nindent 12 }}
            {{- with include "trtmesh.resources" $pool }}{{ trim . | nindent 12 }}{{ end }}
            {{- include "trtmesh.nodes.mounts" . | nindent 12 }}
    workerTemplate:
      metadata:
        labels:
          {{- $rankLabels | nindent 10 }}
        annotations:
          checksum/config: {{ include "trtmesh.config" .config | sha256sum }}
      spec:
        {{- include "trtmesh.nodes.pod" . | nindent 8 }}
        containers:
          - name: ranks
            image: {{ include "trtmesh.engine.image" (dict "root" .root "pool" $pool) | quote }}
            imagePullPolicy: {{ .root.Values.image.pullPolicy }}
            command: [bash, -c]
            args:
              - |
                set -euo pipefail
                install -d -m 700 ~/.ssh && install -m 600 /ssh/* ~/.ssh/
                install -d /run/sshd && ssh-keygen -A
                exec /usr/sbin/sshd -D -e -p 2222
            {{- with include "trtmesh.env" (dict "root" .root "of" $pool) }}{{ trim . | nindent 12 }}{{ end }}
            {{- with include "trtmesh.resources" $pool }}{{ trim . | nindent 12 }}{{ end }}
            {{- include "trtmesh.nodes.mounts" . | nindent 12 }}
{{- end }}

{{- define "trtmesh.nodes.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ quote . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
terminationGracePeriodSeconds: {{ add .grace 15 }}
{{- include "trtmesh.scheduling" (dict "of" .pool "selector" "") }}
{{- with include "trtmesh.model.copy" (dict "root" .root "volume" .volume) }}{{ trim . | nindent 0 }}{{ end }}
volumes:
  {{- include "trtmesh.volumes" (dict "root" .root "config" .name "model" .volume) | nindent 2 }}
  - name: ssh
    secret: {secretName: {{ quote .pool.nodes.sshSecret }}}
  - name: shared-memory
    emptyDir: {medium: Memory, sizeLimit: {{ .pool.sharedMemory | default "16Gi" }}}
  - name: triton
    emptyDir: {}
{{- end }}

{{- define "trtmesh.nodes.mounts" -}}
volumeMounts:
  {{- include "trtmesh.mounts" (dict "root" .root "model" .volume) | nindent 2 }}
  - {name: ssh, mountPath: /ssh, readOnly: true}
  - {name: shared-memory, mountPath: /dev/shm}
  - {name: triton, mountPath: /triton}
{{- end }}
