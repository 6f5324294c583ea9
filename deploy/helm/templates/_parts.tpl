{{/* A name of text, at most so long. A cut one ends in a digest, so that two never are the same. */}}
{{- define "fedtide.name" -}}
{{- $text := .text | lower | replace "." "-" }}
{{- if not (regexMatch "^[a-z]" $text) }}
{{- $text = printf "r-%s" $text }}
{{- end }}
{{- if gt (len $text) 52 }}
{{- $text = printf "%s-%s" (trunc 43 $text | trimAll "-") (sha256sum $text | trunc 8) }}
{{- end }}
{{- $text }}
{{- end }}

{{/* The coordinator's name: of its service, and how the names of its other objects begin. */}}
{{- define "fedtide.coordinator" -}}
{{- include "fedtide.name" (dict "text" (printf "%s-coordinator" (default .Release.Name .Values.fullnameOverride))) }}
{{- end }}

{{/* What all objects of a release are called by. */}}
{{- define "fedtide.labels" -}}
app.kubernetes.io/name: fedtide
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* What finds the pods of a component; takes a list of the component and the root. */}}
{{- define "fedtide.selector" -}}
app.kubernetes.io/instance: {{ (index . 1).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 0 }}
{{- end }}

{{/* The user of the images; nothing of a pod is root's. */}}
{{- define "fedtide.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "fedtide.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* What pods of all kinds may have; takes a list of the values that say so and the root. */}}
{{- define "fedtide.podOptions" -}}
{{- $own := index . 0 }}
{{- with (index . 1).Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* A claim for one pod's own files; takes storage. */}}
{{- define "fedtide.claim" -}}
accessModes: [ReadWriteOnce]
{{- with .className }}
storageClassName: {{ . | quote }}
{{- end }}
resources: {requests: {storage: {{ .size | quote }}}}
{{- end }}
