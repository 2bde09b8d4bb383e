{{/* Names and labels. Pod names must stay within 63 characters: they are worker ids too. */}}

{{- define "pdserve.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 36 | trimSuffix "-" }}
{{- end }}

{{- define "pdserve.fullname" -}}
{{- $name := include "pdserve.name" . }}
{{- $default := contains $name .Release.Name | ternary .Release.Name (printf "%s-%s" .Release.Name $name) }}
{{- .Values.fullnameOverride | default $default | trunc 36 | trimSuffix "-" }}
{{- end }}

{{- define "pdserve.selectorLabels" -}}
app.kubernetes.io/name: {{ include "pdserve.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "pdserve.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "pdserve.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* What runs; a list as JSON. */}}
{{- define "pdserve.components" -}}
{{- $found := list "router" "prefill" "decode" }}
{{- if .Values.gateway.replicas }}
{{- $found = append $found "gateway" }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- define "pdserve.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "pdserve.fullname" .) }}
{{- end }}

{{- define "pdserve.clusterSecret" -}}
{{- .Values.clusterSecret.existingSecret | default (printf "%s-secret" (include "pdserve.fullname" .)) }}
{{- end }}
