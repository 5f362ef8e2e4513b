{{- define "trtmesh.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride }}{{ .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else if contains $name .Release.Name }}{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}{{ printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* What a selector of all pods of the release has. */}}
{{- define "trtmesh.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/* Labels of a pod; another version of the chart alone starts no pod anew. */}}
{{- define "trtmesh.podLabels" -}}
{{ include "trtmesh.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: trtmesh
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* Labels of an object, but the component. */}}
{{- define "trtmesh.labels" -}}
{{ include "trtmesh.podLabels" . }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "trtmesh.tls.secret" -}}
{{- if .Values.tls.existingSecret }}{{ .Values.tls.existingSecret }}
{{- else if .Values.tls.certManager.enabled }}{{ include "trtmesh.fullname" . }}-tls
{{- end }}
{{- end }}

{{/* A value's number, even 0, or the default: dict "of" "key" "default". */}}
{{- define "trtmesh.number" -}}
{{- if and (hasKey .of .key) (not (kindIs "invalid" (get .of .key))) }}{{ get .of .key }}{{ else }}{{ .default }}{{ end }}
{{- end }}

{{- define "trtmesh.image" -}}
{{ printf "%s/%s:%s" .root.Values.image.registry .name .root.Values.image.tag }}
{{- end }}

{{- define "trtmesh.engine.image" -}}
{{- $pool := .pool -}}
{{- if $pool.image }}{{ $pool.image }}
{{- else if $pool.nodes }}{{ include "trtmesh.image" (dict "root" .root "name" "engine-tensorrt-llm-nodes") }}
{{- else if eq ($pool.backend | default "torch") "tensorrt_llm" }}{{ include "trtmesh.image" (dict "root" .root "name" "engine-tensorrt-llm") }}
{{- else if $pool.gpus }}{{ include "trtmesh.image" (dict "root" .root "name" "engine-cuda") }}
{{- else }}{{ include "trtmesh.image" (dict "root" .root "name" "engine") }}
{{- end }}
{{- end }}

{{/* The configuration file of a component: dict "section" "settings". */}}
{{- define "trtmesh.config" -}}
{{ dict .section .settings | toYaml }}
{{- end }}

{{/*
Probes of a container: dict "root" "port" "startupSeconds" "starts" "ready"; the latter two are services of its health:
`live` serves while the event loop answers, '' while the process takes work. No probe but the start's ever kills a
process for what its model does: a busy engine answers `live`.
*/}}
{{- define "trtmesh.probes" -}}
startupProbe:
  {{- include "trtmesh.check" (dict "root" .root "port" .port "service" .starts) | nindent 2 }}
  periodSeconds: 10
  timeoutSeconds: 10
  failureThreshold: {{ max 3 (div (add .startupSeconds 9) 10) }}
readinessProbe:
  {{- include "trtmesh.check" (dict "root" .root "port" .port "service" .ready) | nindent 2 }}
  periodSeconds: 5
  timeoutSeconds: 10
  failureThreshold: 2
livenessProbe:
  {{- include "trtmesh.check" (dict "root" .root "port" .port "service" "live") | nindent 2 }}
  periodSeconds: 30
  timeoutSeconds: 20
  failureThreshold: 6
{{- end }}

{{/* The kubelet speaks gRPC without TLS alone. */}}
{{- define "trtmesh.check" -}}
{{- if include "trtmesh.tls.secret" .root -}}
exec:
  command: {{ compact (list "python" "-m" "trtmesh.chassis.probe" (printf "127.0.0.1:%v" .port) .service) | toJson }}
{{- else -}}
grpc:
  port: {{ .port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "trtmesh.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}

{{/* The head of a pod's specification: dict "root" "of" "selector" "grace". Its life is longer than the drain. */}}
{{- define "trtmesh.pod" -}}
automountServiceAccountToken: false
# Their variables look like settings: the Service x-router makes X_ROUTER_PORT.
enableServiceLinks: false
{{- with .root.Values.serviceAccountName }}
serviceAccountName: {{ quote . }}
{{- end }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
terminationGracePeriodSeconds: {{ add .grace 15 }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- include "trtmesh.scheduling" . }}
{{- end }}

{{- define "trtmesh.scheduling" -}}
{{- with .of.priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- with .of.runtimeClassName }}
runtimeClassName: {{ quote . }}
{{- end }}
{{- with .of.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with .of.affinity }}
affinity: {{ toJson . }}
{{- end }}
{{- $tolerations := .of.tolerations | default list }}
{{- if .of.gpus }}
{{- $tolerations = append $tolerations (dict "key" (.of.gpuResource | default "nvidia.com/gpu") "operator" "Exists" "effect" "NoSchedule") }}
{{- end }}
{{- with $tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .of.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .of.topologySpreadConstraints | nindent 2 }}
{{- else if .selector }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Resources with a pool's devices. */}}
{{- define "trtmesh.resources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- if .gpus -}}
{{- $limits := $resources.limits | default dict -}}
{{- $_ := set $resources "limits" (set $limits (.gpuResource | default "nvidia.com/gpu") (toString .gpus)) -}}
{{- end -}}
{{- with $resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Flags for TLS: dict "root" "section"; routers take clients of their own kind, the others each other alone. */}}
{{- define "trtmesh.tls.args" -}}
{{- if include "trtmesh.tls.secret" .root }}
- --tls-certificate=/tls/tls.crt
- --tls-key=/tls/tls.key
- --tls-client-ca=/tls/ca.crt
{{- if ne .section "tokenizer" }}
- --tls-ca=/tls/ca.crt
- --tls-peer-name={{ .root.Values.tls.peerName }}
{{- end }}
{{- if eq .section "router" }}
- --tls-client-certificates={{ .root.Values.tls.clientCertificates }}
{{- end }}
{{- end }}
{{- end }}

{{/* Variables of a container: those of the probe over TLS, of Triton's compiler, and its own. */}}
{{- define "trtmesh.env" -}}
{{- $env := list -}}
{{- if include "trtmesh.tls.secret" .root -}}
{{- range $name, $value := dict "CA" "/tls/ca.crt" "CERTIFICATE" "/tls/tls.crt" "KEY" "/tls/tls.key" "SERVER_NAME" .root.Values.tls.peerName -}}
{{- $env = append $env (dict "name" (printf "TRTMESH_TLS_%s" $name) "value" $value) -}}
{{- end -}}
{{- end -}}
{{- if .of.gpus -}}
{{- $env = append $env (dict "name" "TRITON_CACHE_DIR" "value" "/triton") -}}
{{- end -}}
{{- with concat $env (.of.env | default list) }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Mounts that every service has: dict "root" "model". */}}
{{- define "trtmesh.mounts" -}}
- {name: config, mountPath: /config, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if include "trtmesh.tls.secret" .root }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- if .model }}
- {{ include "trtmesh.model.mount" .model | fromYaml | toJson }}
{{- end }}
{{- end }}

{{/* Their volumes: dict "root" "config" "model". Secrets are followed when they change. */}}
{{- define "trtmesh.volumes" -}}
- name: config
  configMap: {name: {{ .config }}}
- name: tmp
  emptyDir: {}
{{- with include "trtmesh.tls.secret" .root }}
- name: tls
  secret: {secretName: {{ quote . }}, defaultMode: 0440}
{{- end }}
{{- if .model }}
- name: model
  {{- include "trtmesh.model.volume" (dict "root" .root "volume" .model) | nindent 2 }}
{{- end }}
{{- end }}

{{/* The volume of a model as given, or that of the demo model. */}}
{{- define "trtmesh.model.given" -}}
{{- $volume := coalesce .pool.modelVolume .root.Values.model.volume (dict "copy" (dict "reference" (include "trtmesh.image" (dict "root" .root "name" "demo-model")) "path" "/model")) -}}
{{ toYaml $volume }}
{{- end }}

{{- define "trtmesh.model.mount" -}}
name: model
mountPath: /model
readOnly: true
{{- with .subPath }}
subPath: {{ quote . }}
{{- end }}
{{- end }}

{{- define "trtmesh.model.volume" -}}
{{- if .volume.existingClaim -}}
persistentVolumeClaim: {claimName: {{ quote .volume.existingClaim }}, readOnly: true}
{{- else if .volume.claim -}}
persistentVolumeClaim: {claimName: {{ include "trtmesh.fullname" .root }}-model, readOnly: true}
{{- else if .volume.image -}}
image: {reference: {{ .volume.image.reference | quote }}, pullPolicy: {{ .volume.image.pullPolicy | default "IfNotPresent" }}}
{{- else -}}
emptyDir: {}
{{- end }}
{{- end }}

{{/* The container that copies a model out of an image, if that is asked for: dict "root" "volume". */}}
{{- define "trtmesh.model.copy" -}}
{{- with .volume.copy }}
initContainers:
  - name: model
    image: {{ quote .reference }}
    imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
    command: [cp, -R, {{ printf "%s/." (.path | default "/model") | quote }}, /target]
    {{- include "trtmesh.containerSecurity" $.root | nindent 4 }}
    resources:
      requests: {cpu: 100m, memory: 64Mi}
      limits: {memory: 512Mi}
    volumeMounts:
      - {name: model, mountPath: /target}
{{- end }}
{{- end }}

{{/* Whether every engine may be gone because no request came: then routers must be reached without any. */}}
{{- define "trtmesh.fromZero" -}}
{{- $pools := .Values.pools -}}
{{- $zero := and (not .Values.router.engines) (gt (len $pools) 0) -}}
{{- range $pools }}
{{- if not (and .autoscaling (eq (int (include "trtmesh.number" (dict "of" .autoscaling "key" "minReplicas" "default" 1))) 0)) }}{{ $zero = false }}{{ end }}
{{- end }}
{{- if $zero }}true{{ end }}
{{- end }}

{{/* One pod a minute leaves, and none for a short pause. */}}
{{- define "trtmesh.scaleDown" -}}
scaleDown:
  stabilizationWindowSeconds: 300
  policies:
    - {type: Pods, value: 1, periodSeconds: 60}
{{- end }}
