{{/* Names and labels.  A release called like the chart is not called so twice. */}}

{{- define "tinyloop.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{/* 41 characters leave room for the longest suffix and the replica's number in 63. */}}
{{- define "tinyloop.fullname" -}}
{{- $name := include "tinyloop.name" . -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | trunc 41 | trimSuffix "-" -}}
{{- end -}}

{{- define "tinyloop.selectorLabels" -}}
app.kubernetes.io/name: {{ include "tinyloop.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* The replicas' own: a pod of `helm test` is none of them. */}}
{{- define "tinyloop.podSelectorLabels" -}}
{{ include "tinyloop.selectorLabels" . }}
app.kubernetes.io/component: server
{{- end -}}

{{- define "tinyloop.labels" -}}
{{ include "tinyloop.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- with .Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* name, namespace, labels of an object: call with (list . "-suffix"), the suffix perhaps empty. */}}
{{- define "tinyloop.metadata" -}}
{{- $root := first . -}}
name: {{ include "tinyloop.fullname" $root }}{{ last . }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "tinyloop.labels" $root | nindent 2 }}
{{- end -}}

{{- define "tinyloop.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tinyloop.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tinyloop.image" -}}
{{- $image := .Values.image -}}
{{- $tag := default (printf "%s%s" .Chart.AppVersion (ternary "-cuda13" "" .Values.gpu.enabled)) $image.tag -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $tag }}
{{- end -}}
{{- end -}}

{{- define "tinyloop.tokensSecret" -}}
{{- default (printf "%s-tokens" (include "tinyloop.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}
