{{/* The pod: one server, perhaps an init container that fetches its model. */}}

{{- define "tinyloop.podSpec" -}}
serviceAccountName: {{ include "tinyloop.serviceAccountName" . }}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "tinyloop.gracePeriod" . }}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- if and .Values.gpu.enabled .Values.gpu.runtimeClassName }}
runtimeClassName: {{ .Values.gpu.runtimeClassName }}
{{- end }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- if .Values.model.fetch.image }}
initContainers:
  {{- include "tinyloop.fetchContainer" . | nindent 2 }}
{{- end }}
containers:
  {{- include "tinyloop.serverContainer" . | nindent 2 }}
volumes:
  {{- include "tinyloop.volumes" . | nindent 2 }}
{{- include "tinyloop.placement" . }}
{{- end -}}

{{- define "tinyloop.gracePeriod" -}}
{{- $given := .Values.terminationGracePeriodSeconds -}}
{{- if kindIs "invalid" $given -}}{{ include "tinyloop.leastGracePeriod" . }}{{- else -}}{{ int $given }}{{- end -}}
{{- end -}}

{{- define "tinyloop.serverContainer" -}}
- name: tinyloop
  image: {{ include "tinyloop.image" . }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  args: [serve]
  securityContext:
    {{- toYaml .Values.securityContext | nindent 4 }}
  envFrom:
    - configMapRef:
        name: {{ include "tinyloop.fullname" . }}-settings
  env:
    {{- include "tinyloop.environment" . | nindent 4 }}
  ports:
    - name: grpc
      containerPort: {{ .Values.service.port }}
      protocol: TCP
    - name: health
      containerPort: {{ .Values.service.healthPort }}
      protocol: TCP
    {{- if .Values.metrics.enabled }}
    - name: metrics
      containerPort: {{ .Values.metrics.port }}
      protocol: TCP
    {{- end }}
  {{- include "tinyloop.probes" . | nindent 2 }}
  {{- if .Values.preStopSeconds }}
  lifecycle:
    preStop:
      exec:
        command: [sleep, {{ .Values.preStopSeconds | quote }}]
  {{- end }}
  resources:
    {{- include "tinyloop.resources" . | nindent 4 }}
  volumeMounts:
    {{- include "tinyloop.volumeMounts" . | nindent 4 }}
{{- end -}}

{{/* "" is alive; the service's name is ready, which a busy server stays.  Liveness waits for the startup probe. */}}
{{- define "tinyloop.probes" -}}
startupProbe:
  grpc:
    port: {{ .Values.service.healthPort }}
    service: tinyloop.v1.GenerationService
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ divf .Values.startupSeconds 5 | ceil | int }}
readinessProbe:
  grpc:
    port: {{ .Values.service.healthPort }}
    service: tinyloop.v1.GenerationService
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
livenessProbe:
  grpc:
    port: {{ .Values.service.healthPort }}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{- define "tinyloop.resources" -}}
{{- $resources := deepCopy .Values.resources -}}
{{- with .Values.gpu -}}
{{- if .enabled -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .resourceName (int .count))) -}}
{{- end -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}

{{- define "tinyloop.fetchContainer" -}}
{{- with .Values.model.fetch -}}
- name: fetch-model
  image: {{ .image }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  {{- with .command }}
  command:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .args }}
  args:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .env }}
  env:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .existingSecret }}
  envFrom:
    - secretRef:
        name: {{ . }}
  {{- end }}
  securityContext:
    {{- toYaml $.Values.securityContext | nindent 4 }}
  resources:
    {{- toYaml $.Values.resources | nindent 4 }}
  volumeMounts:
    - name: model
      mountPath: /models
    - name: tmp
      mountPath: /tmp
{{- end -}}
{{- end -}}

{{- define "tinyloop.placement" -}}
{{- $spread := .Values.topologySpreadConstraints }}
{{- if kindIs "invalid" $spread }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tinyloop.podSelectorLabels" $ | nindent 8 }}
  {{- end }}
{{- else if $spread }}
topologySpreadConstraints:
  {{- toYaml $spread | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with concat .Values.tolerations (ternary .Values.gpu.tolerations list .Values.gpu.enabled) }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
