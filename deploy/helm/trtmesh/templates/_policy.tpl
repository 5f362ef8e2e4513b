{{- define "trtmesh.policy.pods" -}}
- podSelector:
    matchLabels:
      {{- include "trtmesh.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "trtmesh.policy.head" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "trtmesh.fullname" .root }}-{{ .component }}
  labels:
    {{- include "trtmesh.labels" .root | nindent 4 }}
spec:
  podSelector:
    matchLabels:
      {{- include "trtmesh.selector" .root | nindent 6 }}
      app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "trtmesh.policy.metrics" -}}
{{- with .Values.networkPolicy.monitoring }}
- from:
    {{- toYaml . | nindent 4 }}
  ports:
    - {protocol: TCP, port: 8002}
{{- end }}
{{- end }}

{{- define "trtmesh.policy.dns" -}}
- ports:
    - {protocol: UDP, port: 53}
    - {protocol: TCP, port: 53}
{{- end }}
